"""Top-k, top-p and min-p over rows of scores.
It knows scores alone: no request, no temperature, no token's meaning.

Order: top-k, then top-p over what top-k left (renormalised), then min-p. Tokens rank by score,
equal scores by id, lowest first:
    top-k  keeps exactly the first k;
    top-p  keeps a token iff the mass ranked before it is below top_p (so always the first);
    min-p  keeps a token iff its probability is at least min_p times the largest one.
What top-k and top-p keep is a prefix of the ranking, so it is found from the sorted values of
a few leading tokens; the whole vocabulary is sorted only for rows whose prefix is longer.
Letters: F filtered rows, C leading tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def filter_scores(
    scores_FV: Tensor, tokens: Filter, *, lead_sizes: Sequence[int] = (64, 1024)
) -> Tensor:
    """A copy of `scores_FV` (float32, finite maximum in each row) with dropped tokens at -inf.

    `lead_sizes` are the numbers of leading tokens tried before the whole vocabulary; the result
    does not depend on them.
    """
    kept_FV = scores_FV
    vocab_size = scores_FV.shape[1]
    if tokens.top_k is not None and tokens.top_k < vocab_size:
        kept_FV = _keep_top_k(scores_FV, tokens.top_k, tokens.top_p)
    elif tokens.top_p < 1.0:
        kept_FV = _keep_top_p(scores_FV, tokens.top_p, lead_sizes)
    if tokens.min_p > 0.0:
        below_FV = kept_FV - kept_FV.amax(-1, keepdim=True) < math.log(tokens.min_p)
        kept_FV = kept_FV.masked_fill(below_FV, -math.inf)
    return kept_FV.clone() if kept_FV is scores_FV else kept_FV


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


def _keep_top_k(scores_FV: Tensor, top_k: int, top_p: float) -> Tensor:
    lead_FC = scores_FV.topk(top_k, dim=-1).values
    before_FC, weight_FC = _masses(lead_FC)
    total_F1 = before_FC[:, -1:] + weight_FC[:, -1:]
    num_kept_F = torch.full_like(lead_FC[:, 0], top_k, dtype=torch.int64)
    if top_p < 1.0:
        num_kept_F = (before_FC < top_p * total_F1).sum(-1)
    return _masked(scores_FV, lead_FC, num_kept_F)


def _keep_top_p(scores_FV: Tensor, top_p: float, lead_sizes: Sequence[int]) -> Tensor:
    vocab_size = scores_FV.shape[1]
    kept_FV = torch.empty_like(scores_FV)
    # The softmax kernel treats each row alone, unlike a sum that may split a single row over
    # threads; the mass of a row must not depend on its batch mates.
    total_F1 = 1.0 / scores_FV.softmax(-1).amax(-1, keepdim=True).to(torch.float64)
    open_F = torch.arange(len(scores_FV), device=scores_FV.device)
    for lead_size in (*(size for size in lead_sizes if size < vocab_size), vocab_size):
        lead_FC = scores_FV[open_F].topk(lead_size, dim=-1).values
        before_FC, _ = _masses(lead_FC)
        num_kept_F = (before_FC < top_p * total_F1[open_F]).sum(-1)
        is_closed_F = num_kept_F < lead_size
        if lead_size == vocab_size:
            is_closed_F = torch.ones_like(is_closed_F)
        closed_F = open_F[is_closed_F]
        kept_FV[closed_F] = _masked(
            scores_FV[closed_F], lead_FC[is_closed_F], num_kept_F[is_closed_F]
        )
        open_F = open_F[~is_closed_F]
        if not len(open_F):
            break
    return kept_FV


def _masses(lead_FC: Tensor) -> tuple[Tensor, Tensor]:
    """Mass ranked before each leading token and its own, the first token's own mass being 1."""
    weight_FC = (lead_FC - lead_FC[:, :1]).to(torch.float64).exp()
    return weight_FC.cumsum(-1) - weight_FC, weight_FC


def _masked(scores_FV: Tensor, lead_FC: Tensor, num_kept_F: Tensor) -> Tensor:
    last_F = lead_FC.gather(1, (num_kept_F - 1)[:, None])[:, 0]
    return scores_FV.masked_fill(~keep_leading(scores_FV, num_kept_F, last_F), -math.inf)
