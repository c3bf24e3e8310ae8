"""Held-out accepted length while training: teacher forced, on answers kept out by prompt.

It changes no weights. The decoded accepted length is what `dspark evaluate` measures.

Letters: A blocks, K block_size, N supervised slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.training.objective import Objective
from dspark.training.ranks import Ranks
from dspark.training.slot_pass import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Means over the held-out slots; `tau` over blocks whose K slots are all supervised."""

    tau: float
    """1 + mean over blocks of sum_k prod_{i<=k} (1 - TV_i); between 1 and K + 1."""
    acceptance_K: tuple[float, ...]
    """Mean 1 - TV at each slot."""
    agreement_K: tuple[float, ...]
    """Share of slots where draft and target have the same most likely token."""
    confidence_error: float | None
    """Mean |c - (1 - TV)|."""
    num_blocks: int


@torch.no_grad()
def validate(
    objective: Objective,
    batches: Iterable[Batch],
    *,
    input_scale_M: Tensor | None,
    ranks: Ranks | None = None,
) -> Validation | None:
    """Accepted length of the drafter as it is now on `batches` (the target at temperature 1).

    Each rank brings its share of the batches. `None` without batches, or where the loss has no
    use for the target.
    """
    block_size = objective.slot_pass.sizes.block_size
    sums = torch.zeros(6, max(block_size, 2), dtype=torch.float64)
    for batch in batches:
        outcome = objective(batch, normaliser=1.0, input_scale_M=input_scale_M, has_agreement=True)
        if outcome.head.acceptance_N is None or outcome.head.agrees_N is None:
            return None
        acceptance_AK = torch.zeros_like(batch.valid_AK, dtype=torch.float64)
        acceptance_AK.view(-1)[batch.rows_N] = outcome.head.acceptance_N.double()
        agrees_AK = torch.zeros_like(acceptance_AK)
        agrees_AK.view(-1)[batch.rows_N] = outcome.head.agrees_N.double()
        is_whole_A = batch.valid_AK.all(dim=1)
        sums[0, :block_size] += acceptance_AK.sum(dim=0).cpu()
        sums[1, :block_size] += agrees_AK.sum(dim=0).cpu()
        sums[2, :block_size] += batch.valid_AK.sum(dim=0).cpu()
        sums[3, :block_size] += acceptance_AK[is_whole_A].cumprod(dim=1).sum(dim=0).cpu()
        sums[4, :2] += torch.tensor([int(is_whole_A.sum()), int(batch.valid_AK[:, 0].sum())])
        if outcome.confidence_N is not None:
            error_N = (outcome.confidence_N.sigmoid() - outcome.head.acceptance_N).abs()
            sums[5, :2] += torch.tensor([float(error_N.sum()), len(error_N)], dtype=torch.float64)
    if ranks is not None:
        ranks.sum_all([sums])
    return _validation(sums, block_size)


def _validation(sums: Tensor, block_size: int) -> Validation | None:
    """Rows: accepted, agreed and supervised slots, survival of whole blocks, counts, errors."""
    accepted_K, agreed_K, num_K, survival_K = sums[:4, :block_size]
    num_whole, num_blocks = int(sums[4, 0]), int(sums[4, 1])
    if num_blocks == 0:
        return None
    per_slot_K = num_K.clamp(min=1)
    return Validation(
        tau=1.0 + float(survival_K.sum()) / max(num_whole, 1),
        acceptance_K=tuple((accepted_K / per_slot_K).tolist()),
        agreement_K=tuple((agreed_K / per_slot_K).tolist()),
        confidence_error=float(sums[5, 0] / sums[5, 1]) if float(sums[5, 1]) > 0 else None,
        num_blocks=num_blocks,
    )
