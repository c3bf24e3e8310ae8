"""Top-k, top-p and min-p over rows of scores.
It knows scores alone: no request, no temperature, no token's meaning.

Order: top-k, then top-p over what top-k left (renormalised), then min-p. Tokens rank by score,
equal scores by id, lowest first:
    top-k  keeps exactly the first k;
    top-p  keeps a token iff the mass ranked before it is below top_p (so always the first);
    min-p  keeps a token iff its probability is at least min_p times the largest one.
Sums and roundings are those of `prefix_search`. What top-k and top-p keep is a prefix of the
ranking. Its length and the score of its last token follow from the scores without their ids;
which of equal scores it takes is settled afterwards.
Letters: F filtered rows, C leading tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.algorithms.prefix_search import leading_prefix
from dspark.algorithms.row_chunks import row_runs
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


def filter_rows_(scores_FV: Tensor, filters: Sequence[Filter]) -> None:
    """`filter_scores_` of each row by a filter of its own, neighbours of one filter together."""
    for rows, group in row_runs(filters, lambda tokens: tokens):
        if not group[0].keeps_all:
            filter_scores_(scores_FV[rows], group[0])


def filter_scores_(scores_FV: Tensor, tokens: Filter) -> None:
    """Sets dropped tokens to -inf in place; float32 scores, the maximum of each row is 0."""
    if tokens.top_k is not None or tokens.top_p < 1.0:
        if scores_FV.device.type == "cpu":
            for scores_V in scores_FV:
                _keep_prefix_(scores_V, tokens)
        else:
            keep_prefixes_(scores_FV, tokens)
    if tokens.min_p > 0.0:
        _drop_below_(scores_FV, math.log(tokens.min_p))


def keep_prefixes_(scores_FV: Tensor, tokens: Filter) -> None:
    """Top-k and top-p over all rows at once, for devices whose host must not wait for each row.

    Without top-k it sorts: only a value read back would tell how few of the scores matter.
    """
    limit = min(tokens.top_k or scores_FV.shape[1], scores_FV.shape[1])
    if limit < scores_FV.shape[1]:
        lead_FC = scores_FV.topk(limit).values
    else:
        lead_FC = scores_FV.sort(-1, descending=True).values
    num_kept_F = _prefix_lengths(lead_FC, tokens.top_p)
    last_F = lead_FC.gather(1, num_kept_F[:, None] - 1)[:, 0]
    scores_FV.masked_fill_(~keep_leading(scores_FV, num_kept_F, last_F), -math.inf)


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


def _keep_prefix_(scores_V: Tensor, tokens: Filter) -> None:
    values_V = scores_V.numpy()
    num_kept, last = leading_prefix(values_V, top_k=tokens.top_k, top_p=tokens.top_p)
    num_surplus = int(np.count_nonzero(values_V >= last)) - num_kept
    _drop_below_(scores_V, last)
    if num_surplus > 0:
        values_V[np.flatnonzero(values_V == last)[-num_surplus:]] = -np.inf


def _drop_below_(scores: Tensor, floor: float) -> None:
    # One vectorised pass, where a mask takes several; it keeps what is above its threshold.
    under = float(np.nextafter(np.float32(floor), np.float32(-np.inf)))
    torch.threshold_(scores, under, -math.inf)


def _prefix_lengths(lead_FC: Tensor, top_p: float) -> Tensor:
    """How many leading tokens top-p keeps of each row: int64 [F], at least 1."""
    if top_p == 1.0:
        return torch.full_like(lead_FC[:, 0], lead_FC.shape[1], dtype=torch.int64)
    # A running sum goes token by token, whoever shares the batch.
    mass_FC = lead_FC.exp().cumsum(-1, dtype=torch.float64)
    num_below_F = torch.searchsorted(mass_FC, top_p * mass_FC[:, -1:])[:, 0]
    return (num_below_F + 1).clamp(max=lead_FC.shape[1])
