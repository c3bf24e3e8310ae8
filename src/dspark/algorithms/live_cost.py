"""Live correction of a step cost: what steps really took, against what the table said.
It knows a table and samples; it keeps no state, so that forgetting is the caller's choice of
samples and the window given here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dspark.algorithms.ranking import Floats, Ints
from dspark.algorithms.step_cost import StepCost, VerifyRow

# Samples further from their median than this many deviations, and than this ratio, are outliers.
_NUM_DEVIATIONS = 4.0
_LEAST_OUTLIER = math.log(1.25)


class Part(StrEnum):
    """The two parts of a step that are timed apart."""

    DRAFT = "draft"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured part of one step."""

    part: Part
    num_requests: int
    """Those that draft, or all that take part."""
    num_tokens: int
    """Target tokens; for the drafter's part of no meaning."""
    context: int
    """Positions that these requests hold."""
    seconds: float


def merged(
    cost: StepCost, samples: Sequence[StepSample], *, window: int = 32, prior: int = 4
) -> StepCost:
    """The table corrected by live measurements, oldest first. `cost` is the profile itself.

    Each entry is multiplied by the typical ratio of measured to priced time among the last
    `window` samples nearest to it, outliers dropped; older ones are forgotten. The ratio of the
    last `window` samples of the whole part counts as `prior` samples more, so that entries that
    nobody visits follow a machine that turned slow.
    """
    drafts = [s for s in samples if s.part is Part.DRAFT]
    verifies = [s for s in samples if s.part is Part.VERIFY]
    drafting_N = np.array([s.num_requests for s in drafts], dtype=np.int64)
    context_N = np.array([s.context for s in drafts], dtype=np.int64)
    ratios_N = _log_ratios(drafts, cost.draft_seconds(drafting_N, context_N))
    weights = _Weights(overall=_typical(ratios_N[-window:]), window=window, prior=prior)
    draft = cost.draft.scaled(weights.factors(cost.draft.sizes, drafting_N, ratios_N))
    return replace(cost, draft=draft, verify=_verify_rows(cost, verifies, window, prior))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """How the samples of an entry and those of the whole part are mixed."""

    overall: float
    window: int
    prior: int

    def factors(self, sizes: Sequence[int], sizes_N: Ints, ratios_N: Floats) -> list[float]:
        """What each entry of a curve is multiplied by, from the samples nearest to it."""
        nearest_N = _nearest(sizes, sizes_N)
        factors = []
        for entry in range(len(sizes)):
            recent = ratios_N[nearest_N == entry][-self.window :]
            total = len(recent) * _typical(recent) + self.prior * self.overall
            factors.append(math.exp(total / (len(recent) + self.prior)))
        return factors


def _verify_rows(
    cost: StepCost, samples: Sequence[StepSample], window: int, prior: int
) -> tuple[VerifyRow, ...]:
    requests_N = np.array([s.num_requests for s in samples], dtype=np.int64)
    tokens_N = np.array([s.num_tokens for s in samples], dtype=np.int64)
    context_N = np.array([s.context for s in samples], dtype=np.int64)
    priced_N = np.zeros(len(samples))
    for num_requests in set(requests_N.tolist()):
        same_N = requests_N == num_requests
        priced_N[same_N] = cost.verify_seconds(num_requests, tokens_N[same_N], context_N[same_N])
    ratios_N = _log_ratios(samples, priced_N)
    weights = _Weights(overall=_typical(ratios_N[-window:]), window=window, prior=prior)
    row_N = _nearest([row.num_requests for row in cost.verify], requests_N)
    return tuple(
        replace(
            row,
            curve=row.curve.scaled(
                weights.factors(row.curve.sizes, tokens_N[row_N == i], ratios_N[row_N == i])
            ),
        )
        for i, row in enumerate(cost.verify)
    )


def _log_ratios(samples: Sequence[StepSample], priced_N: Floats) -> Floats:
    """Measured over priced time; 0, no news, where either is nothing."""
    measured_N = np.array([s.seconds for s in samples], dtype=np.float64)
    is_known_N = (measured_N > 0.0) & (priced_N > 0.0)
    return np.log(np.where(is_known_N, measured_N, 1.0) / np.where(is_known_N, priced_N, 1.0))


def _nearest(sizes: Sequence[int], sizes_N: Ints) -> Ints:
    """The entry for each sample that is the same number of times larger or smaller: [N]."""
    log_S = np.log(np.maximum(sizes, 1))
    nearest_N: Ints = np.abs(np.log(np.maximum(sizes_N, 1))[:, None] - log_S).argmin(1)
    return nearest_N


def _typical(ratios_N: Floats) -> float:
    """Median of log ratios, refined by the mean of those near it; 0 without any."""
    if len(ratios_N) == 0:
        return 0.0
    distance_N = np.abs(ratios_N - np.median(ratios_N))
    reach = max(_NUM_DEVIATIONS * float(np.median(distance_N)), _LEAST_OUTLIER)
    return float(ratios_N[distance_N <= reach].mean())
