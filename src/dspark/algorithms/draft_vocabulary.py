"""The subset of the target's tokens that a drafter can propose, as maps in both directions.
It knows neither drafter nor request. V target vocabulary, S draft vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """Column s of the drafter's logits stands for target token `d2t_S[s]`."""

    d2t_S: Tensor  # int64, distinct target ids
    column_V: Tensor  # int64, inverse of d2t_S; S for a token that is not in the subset

    @classmethod
    def of(cls, d2t_S: Tensor, *, vocab_size: int) -> "DraftVocabulary":
        """Builds the inverse map; `d2t_S` holds distinct ids in 0..vocab_size-1."""
        d2t_S = d2t_S.to(torch.int64)
        column_V = torch.full((vocab_size,), len(d2t_S), dtype=torch.int64, device=d2t_S.device)
        column_V[d2t_S] = torch.arange(len(d2t_S), device=d2t_S.device)
        return cls(d2t_S=d2t_S, column_V=column_V)

    @property
    def size(self) -> int:
        """Number of tokens that can be drafted."""
        return len(self.d2t_S)

    def columns(self, ids: Tensor) -> Tensor:
        """Columns of those `ids` that are in the subset; the others are left out."""
        columns = self.column_V[ids]
        return columns[columns < self.size]
