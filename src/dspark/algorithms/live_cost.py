"""Live correction of a step cost: what steps really took, against what the table said.
It knows a table and samples. `merged` keeps no state and says what is meant; `CostRatios` gives
the same table from sums that are kept, a few rows at a time, for use between steps.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.ranking import Floats, Ints
from dspark.algorithms.step_cost import Entry, SampledCost, StepCost, VerifyRow

# Samples further from their median than this many deviations, and than this ratio, are outliers.
_NUM_DEVIATIONS = 4.0
_LEAST_OUTLIER = math.log(1.25)


class Part(StrEnum):
    """The two parts of a step that are timed apart."""

    DRAFT = "draft"
    VERIFY = "verify"


class StepSample(NamedTuple):
    """One measured part of one step."""

    part: Part
    num_requests: int
    """Those that draft, or all that take part."""
    num_tokens: int
    """Target tokens; for the drafter's part of no meaning."""
    context: int
    """Positions that these requests hold."""
    seconds: float
    sampled: float = 0.0
    """Share of the requests that are sampled."""


def merged(
    cost: StepCost, samples: Sequence[StepSample], *, window: int = 32, prior: int = 4
) -> StepCost:
    """The table corrected by live measurements, oldest first. `cost` is the profile itself.

    Each entry is multiplied by the typical ratio of measured to priced time among the last
    `window` samples nearest to it, outliers dropped; older ones are forgotten. The ratio of the
    last `window` samples of the whole part counts as `prior` samples more, so that entries that
    nobody visits follow a machine that turned slow; what sampled requests cost more follows it too.
    """
    drafts = [s for s in samples if s.part is Part.DRAFT]
    verifies = [s for s in samples if s.part is Part.VERIFY]
    drafting_N = np.array([s.num_requests for s in drafts], dtype=np.int64)
    context_N = np.array([s.context for s in drafts], dtype=np.int64)
    share_N = np.array([s.sampled for s in drafts])
    priced_N = cost.draft_seconds(drafting_N, context_N, sampled=share_N)
    ratios_N = _log_ratios(drafts, priced_N)
    weights = _Weights(overall=_typical(ratios_N[-window:]), window=window, prior=prior)
    draft = cost.draft.scaled(weights.factors(cost.draft.sizes, drafting_N, ratios_N))
    ratios_N = _log_ratios(verifies, _priced(cost, verifies))
    overall = _typical(ratios_N[-window:])
    return replace(
        cost,
        draft=draft,
        verify=_verify_rows(cost, verifies, ratios_N, window, prior),
        sampled=_sampled(cost, weights.overall, overall),
    )


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


def _priced(cost: StepCost, samples: Sequence[StepSample]) -> Floats:
    """What the table says of parts of the kind VERIFY: [N]."""
    requests_N = np.array([s.num_requests for s in samples], dtype=np.int64)
    tokens_N = np.array([s.num_tokens for s in samples], dtype=np.int64)
    context_N = np.array([s.context for s in samples], dtype=np.int64)
    share_N = np.array([s.sampled for s in samples])
    priced_N = np.zeros(len(samples))
    for num_requests in set(requests_N.tolist()):
        same_N = requests_N == num_requests
        priced_N[same_N] = cost.verify_seconds(
            num_requests, tokens_N[same_N], context_N[same_N], sampled=share_N[same_N]
        )
    return priced_N


def _verify_rows(
    cost: StepCost, samples: Sequence[StepSample], ratios_N: Floats, window: int, prior: int
) -> tuple[VerifyRow, ...]:
    requests_N = np.array([s.num_requests for s in samples], dtype=np.int64)
    tokens_N = np.array([s.num_tokens for s in samples], dtype=np.int64)
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


def _sampled(cost: StepCost, draft: float, verify: float) -> SampledCost | None:
    """What sampled requests cost more, by the typical log ratios of the two parts."""
    if cost.sampled is None:
        return None
    return cost.sampled.scaled(math.exp(draft), math.exp(verify))


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


class CostRatios:
    """Samples kept as log ratios by the entry of the table that they belong to."""

    def __init__(
        self, cost: StepCost, *, num_samples: int = 512, window: int = 32, prior: int = 4
    ) -> None:
        """`cost`: the profile. Samples further back than `num_samples` are forgotten."""
        self._cost, self._num_samples = cost, num_samples
        self._draft = _CurveRatios(cost.draft, window, prior)
        self._verify = [_CurveRatios(row.curve, window, prior) for row in cost.verify]
        self._recent_drafts: deque[tuple[int, float]] = deque(maxlen=window)
        self._recent_verifies: deque[tuple[int, float]] = deque(maxlen=window)
        self._num_seen = 0
        self._row_of: dict[int, int] = {}
        self._draft_entries: dict[int, Entry] = {}
        self._verify_entries: dict[tuple[int, int], Entry] = {}

    def add(self, sample: StepSample) -> None:
        """The newest sample."""
        self._num_seen += 1
        priced = self._seconds(sample)
        is_known = sample.seconds > 0.0 and priced > 0.0
        item = (self._num_seen, math.log(sample.seconds / priced) if is_known else 0.0)
        if sample.part is Part.DRAFT:
            self._recent_drafts.append(item)
            self._draft.add(sample.num_requests, item)
        else:
            self._recent_verifies.append(item)
            self._verify[self._row(sample.num_requests)].add(sample.num_tokens, item)

    def table(self, rows: Sequence[int]) -> StepCost:
        """The corrected table, with these rows of `verify` alone; see `StepCost.rows_around`."""
        oldest = self._num_seen - self._num_samples
        of_drafts = _typical_of(self._recent_drafts, oldest)
        of_verifies = _typical_of(self._recent_verifies, oldest)
        return replace(
            self._cost,
            draft=self._draft.corrected(of_drafts, oldest),
            verify=tuple(
                replace(self._cost.verify[i], curve=self._verify[i].corrected(of_verifies, oldest))
                for i in rows
            ),
            sampled=_sampled(self._cost, of_drafts, of_verifies),
        )

    def _seconds(self, sample: StepSample) -> float:
        """What the profile says of it."""
        part, num_requests, num_tokens, context, _, sampled = sample
        if part is Part.DRAFT:
            entry = self._draft_entries.get(num_requests)
            if entry is None:
                entry = self._cost.draft_entry(num_requests)
                self._draft_entries[num_requests] = entry
            return self._cost.draft_in_context(entry, num_requests, context, sampled=sampled)
        entry = self._verify_entries.get((num_requests, num_tokens))
        if entry is None:
            entry = self._cost.verify_entry(num_requests, num_tokens)
            self._verify_entries[num_requests, num_tokens] = entry
        return self._cost.verify_in_context(
            entry, num_requests, num_tokens, context, sampled=sampled
        )

    def _row(self, num_requests: int) -> int:
        found = self._row_of.get(num_requests)
        if found is None:
            numbers = [row.num_requests for row in self._cost.verify]
            found = int(_nearest(numbers, np.array([num_requests]))[0])
            self._row_of[num_requests] = found
        return found


class _CurveRatios:
    """The ratios of one curve."""

    def __init__(self, curve: CostCurve, window: int, prior: int) -> None:
        self._curve, self._window, self._prior = curve, window, prior
        self._entries: dict[int, deque[tuple[int, float]]] = {}
        self._entry_of: dict[int, int] = {}

    def add(self, size: int, item: tuple[int, float]) -> None:
        entry = self._entry_of.get(size)
        if entry is None:
            entry = self._entry_of[size] = int(_nearest(self._curve.sizes, np.array([size]))[0])
            self._entries.setdefault(entry, deque(maxlen=self._window))
        self._entries[entry].append(item)

    def corrected(self, overall: float, oldest: int) -> CostCurve:
        """Every entry times its own typical ratio, mixed with that of the whole part."""
        factors = [math.exp(overall)] * len(self._curve.sizes)
        for entry, items in self._entries.items():
            count = sum(number > oldest for number, _ in items)
            total = count * _typical_of(items, oldest) + self._prior * overall
            factors[entry] = math.exp(total / (count + self._prior))
        return self._curve.scaled(factors)


def _typical_of(items: deque[tuple[int, float]], oldest: int) -> float:
    """`_typical` of the ratios that are newer than number `oldest`, in plain arithmetic."""
    ratios = [ratio for number, ratio in items if number > oldest]
    if not ratios:
        return 0.0
    median = statistics.median(ratios)
    distances = [abs(ratio - median) for ratio in ratios]
    reach = max(_NUM_DEVIATIONS * statistics.median(distances), _LEAST_OUTLIER)
    near = [ratio for ratio, distance in zip(ratios, distances, strict=True) if distance <= reach]
    return sum(near) / len(near)
