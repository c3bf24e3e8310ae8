"""Step costs that are no ground for choosing a budget, and why: flat, noisy or inert.
It judges a table; what to do without one is for the caller to say.
"""

import statistics
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dspark.algorithms.prefix_scheduler import Limits, choose_budget
from dspark.algorithms.step_cost import StepCost, VerifyRow

# Costs that differ by less than this make every token look free.
_FLAT = 0.02
# A table whose medians are known no better than this says little about a single token.
_NOISY = 0.05
# Between confidences that hardly ever occur, no choice needs to differ.
_CONFIDENCES = np.linspace(0.4, 0.95, 12)


class Fault(StrEnum):
    """What is wrong, and what it means for serving."""

    FLAT = "flat"  # every token looks free: nothing can be chosen
    NOISY = "noisy"
    NEVER_PAYS = "never pays"  # inert: plain decoding is best at any confidence
    ALWAYS_PAYS = "always pays"  # inert: the whole block is best at any confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault and the sentence that goes with it."""

    fault: Fault
    reason: str


def find_fault(cost: StepCost) -> Finding | None:
    """The first fault of the table, `None` if it is sound."""
    return _flat(cost) or _noisy(cost) or _inert(cost)


def _flat(cost: StepCost) -> Finding | None:
    curves = [row.curve for row in cost.verify]
    if any(max(c.seconds) > (1.0 + _FLAT) * min(c.seconds) for c in curves):
        return None
    sizes = sorted({size for curve in curves for size in curve.sizes})
    reason = (
        f"{sizes[0]} and {sizes[-1]} tokens cost the same within {_FLAT:.0%}, so every token looks "
        "free; measure more tokens or requests."
    )
    if len(sizes) == 1:
        reason = f"only {sizes[0]} tokens were measured, so every token looks free."
    return Finding(fault=Fault.FLAT, reason=reason)


def _noisy(cost: StepCost) -> Finding | None:
    errors = [
        error / seconds
        for row in cost.verify
        for error, seconds in zip(row.curve.errors, row.curve.seconds, strict=True)
        if seconds > 0.0
    ]
    typical = statistics.median(errors) if errors else 0.0
    if typical <= _NOISY:
        return None
    return Finding(
        fault=Fault.NOISY,
        reason=f"a typical entry is known to {typical:.0%} only, and {_NOISY:.0%} is the limit; "
        "measure again with nothing else running, or more often.",
    )


def _inert(cost: StepCost) -> Finding | None:
    """A table whose best budget is the same whatever the confidence."""
    shares = {share for row in cost.verify for share in _best_shares(cost, row)}
    if shares == {0.0}:
        return Finding(
            fault=Fault.NEVER_PAYS,
            reason="no number of drafted tokens pays at any confidence up to 0.95; decode "
            "plainly, or train a smaller drafter.",
        )
    if shares == {1.0}:
        return Finding(
            fault=Fault.ALWAYS_PAYS,
            reason="the whole block pays at every confidence from 0.4 on; verify whole blocks, "
            "or measure more requests.",
        )
    return None


def _best_shares(cost: StepCost, row: VerifyRow) -> list[float]:
    """The best budget as a share of all drafts, by confidence."""
    requests, most = row.num_requests, row.num_requests * cost.block_size
    prices = cost.prices(
        num_requests=requests,
        num_drafting=requests,
        num_prompt_tokens=0,
        num_certain=requests,
        context=requests * cost.context,
        most=most,
        is_drafted=False,
    )
    limits = Limits(caps_R=np.full(requests, cost.block_size))
    shares = []
    for confidence in _CONFIDENCES:
        survival_K = np.cumprod(np.full(cost.block_size, confidence, dtype=np.float32))
        choice = choose_budget(np.tile(survival_K, (requests, 1)), prices, limits)
        shares.append(choice.budget / most)
    return shares
