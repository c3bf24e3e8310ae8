"""Top-k, top-p and min-p over rows of scores.
It knows scores alone: no request, no temperature, no token's meaning.

Order: top-k, then top-p over what top-k left (renormalised), then min-p. Tokens rank by score,
equal scores by id, lowest first:
    top-k  keeps exactly the first k;
    top-p  keeps a token iff the mass ranked before it is below top_p (so always the first);
    min-p  keeps a token iff its probability is at least min_p times the largest one.
What top-k and top-p keep is a prefix of the ranking. Its length follows from the sorted scores
without their ids; which of equal scores it takes is settled afterwards.
Letters: F filtered rows, C leading tokens, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.algorithms.row_chunks import row_chunks
from dspark.core import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The filters of a request; fields as in `SamplingParams`."""

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> "Filter":
        """The filters that `params` asks for."""
        return cls(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)

    @property
    def keeps_all(self) -> bool:
        """Whether no token can be dropped."""
        return self.top_k is None and self.top_p == 1.0 and self.min_p == 0.0


def filter_scores_(scores_FV: Tensor, tokens: Filter) -> None:
    """Sets dropped tokens to -inf in place; float32 scores with a finite maximum in each row."""
    for rows in row_chunks(scores_FV):
        _filter_chunk_(scores_FV[rows], tokens)


def keep_leading(scores_FV: Tensor, num_kept_F: Tensor, last_F: Tensor) -> Tensor:
    """Mask [F, V] of the first `num_kept_F` tokens of each row's ranking.

    `last_F` is the score of the last one kept; tokens at exactly that score go by lowest id.
    """
    kept_FV = scores_FV >= last_F[:, None]
    if torch.equal(kept_FV.sum(-1), num_kept_F):
        return kept_FV
    above_FV = scores_FV > last_F[:, None]
    ties_FV = kept_FV & ~above_FV
    num_ties_F = num_kept_F - above_FV.sum(-1)
    return above_FV | (ties_FV & (ties_FV.cumsum(-1) <= num_ties_F[:, None]))


def _filter_chunk_(scores_FV: Tensor, tokens: Filter) -> None:
    limit = min(tokens.top_k or scores_FV.shape[1], scores_FV.shape[1])
    if limit < scores_FV.shape[1] or tokens.top_p < 1.0:
        lead_FC = _sorted_descending(scores_FV)[:, :limit]
        num_kept_F = _prefix_lengths(lead_FC, tokens.top_p)
        last_F = lead_FC.gather(1, num_kept_F[:, None] - 1)[:, 0]
        kept_FV = keep_leading(scores_FV, num_kept_F, last_F)
        scores_FV.masked_fill_(~kept_FV, -math.inf)
    if tokens.min_p > 0.0:
        below_FV = scores_FV - scores_FV.amax(-1, keepdim=True) < math.log(tokens.min_p)
        scores_FV.masked_fill_(below_FV, -math.inf)


def _prefix_lengths(lead_FC: Tensor, top_p: float) -> Tensor:
    """How many leading tokens top-p keeps of each row: int64 [F], at least 1."""
    if top_p == 1.0:
        return torch.full_like(lead_FC[:, 0], lead_FC.shape[1], dtype=torch.int64)
    # A running sum goes token by token, whoever shares the batch.
    mass_FC = (lead_FC - lead_FC[:, :1]).exp().cumsum(-1, dtype=torch.float64)
    num_below_F = torch.searchsorted(mass_FC, top_p * mass_FC[:, -1:])[:, 0]
    return (num_below_F + 1).clamp(max=lead_FC.shape[1])


def _sorted_descending(scores_FV: Tensor) -> Tensor:
    if scores_FV.device.type == "cpu":
        # NumPy sorts floats some twenty times faster than torch, which carries indices along.
        return torch.from_numpy(-np.sort(-scores_FV.numpy(), axis=-1))
    return scores_FV.sort(-1, descending=True).values
