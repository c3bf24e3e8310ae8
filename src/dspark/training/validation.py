"""Held-out accepted length while training: teacher forced, on answers kept out by prompt.

It changes no weights. The decoded accepted length is what `dspark evaluate` measures.

Letters: A blocks, K block_size, N supervised slots.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.training.objective import Objective
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
    objective: Objective, batches: Iterable[Batch], *, input_scale_M: Tensor | None
) -> Validation | None:
    """Accepted length of the drafter as it is now on `batches` (the target at temperature 1).

    `None` without batches, or where the loss has no use for the target.
    """
    accepted, agreed, whole, error = [], [], [], []
    for batch in batches:
        outcome = objective(batch, normaliser=1.0, input_scale_M=input_scale_M, has_agreement=True)
        if outcome.head.acceptance_N is None or outcome.head.agrees_N is None:
            return None
        acceptance_AK = torch.zeros_like(batch.valid_AK, dtype=torch.float64)
        acceptance_AK.view(-1)[batch.rows_N] = outcome.head.acceptance_N.double()
        agrees_AK = torch.zeros_like(batch.valid_AK)
        agrees_AK.view(-1)[batch.rows_N] = outcome.head.agrees_N
        accepted.append(acceptance_AK.cpu())
        agreed.append(agrees_AK.cpu())
        whole.append(batch.valid_AK.cpu())
        if outcome.confidence_N is not None:
            guess_N = outcome.confidence_N.sigmoid()
            error.append((guess_N - outcome.head.acceptance_N).abs().cpu())
    if not accepted:
        return None
    acceptance_AK, valid_AK = torch.cat(accepted), torch.cat(whole)
    is_whole_A = valid_AK.all(dim=1)
    survival_AK = acceptance_AK[is_whole_A].cumprod(dim=1)
    num_K = valid_AK.sum(dim=0).clamp(min=1)
    return Validation(
        tau=1.0 + float(survival_AK.sum(dim=1).mean()) if bool(is_whole_A.any()) else 1.0,
        acceptance_K=_per_slot(acceptance_AK, num_K),
        agreement_K=_per_slot(torch.cat(agreed).double(), num_K),
        confidence_error=float(torch.cat(error).mean()) if error else None,
        num_blocks=valid_AK.shape[0],
    )


def _per_slot(values_AK: Tensor, num_K: Tensor) -> tuple[float, ...]:
    return tuple((values_AK.sum(dim=0) / num_K).tolist())
