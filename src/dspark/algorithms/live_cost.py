"""Live correction of a step cost: what steps really took, against what the table said.
It knows a table and samples.

    log(measured / priced) of a sample
        =  speed of the machine then  +  its tilt then  +  own factor of the entry

The tilt is what products take more than the memory does (`two_speeds`), by the entry's share of
them; it is followed from sample to sample. Speed and own factors are told apart by samples of one
stretch of time: they share the machine's speed, and what still differs is the entries' own. Entries
that were seen at different times must not be compared by what they took: a machine that others
share moves by more than a token costs, and the entry that was seen last would look dear or cheap
for that.
Letters: N samples, E entries of a part, S stretches.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.ranking import Floats, Ints
from dspark.algorithms.step_cost import Entry, SampledCost, StepCost
from dspark.algorithms.two_speeds import Speeds, SpeedTracker, products_shares, tilts

# Samples further from what is expected than this many deviations, and than this ratio, are
# outliers.
_NUM_DEVIATIONS = 4.0
_LEAST_OUTLIER = math.log(1.25)
_NUM_LOOKS = 3


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


def merged(cost: StepCost, samples: Sequence[StepSample], **options: int) -> StepCost:
    """The table corrected by live measurements, oldest first. `cost` is the profile itself."""
    ratios = CostRatios(cost, **options)
    for sample in samples:
        ratios.add(sample)
    return ratios.table(range(len(cost.verify)))


class Correction(NamedTuple):
    """Logs of what a part of the table is multiplied by."""

    speed: float
    """Every entry: the machine now against that of the profile."""
    own_E: Floats
    """Each entry besides; 0 where nothing is known of it."""


def correction(
    entries_N: Ints, ratios_N: Floats, *, num_entries: int, window: int, prior: int
) -> Correction:
    """Speed of the last `window` samples and own factors, by least squares over log ratios.

    Own factors are drawn to 0 as if by `prior` samples of that. Outliers lose their weight from
    look to look. Oldest samples come first; those that fill no stretch are left out.
    """
    own_E = np.zeros(num_entries)
    if len(ratios_N) == 0:
        return Correction(0.0, own_E)
    length = min(window, len(ratios_N))
    used = len(ratios_N) // length * length
    seen, place_N = np.unique(entries_N[-used:], return_inverse=True)
    ratios_SW = ratios_N[-used:].reshape(-1, length)
    place_SW, weights_SW = place_N.reshape(-1, length), np.ones_like(ratios_SW)
    for look in range(1, _NUM_LOOKS + 1):
        own = _own_factors(place_SW, ratios_SW, weights_SW, len(seen), float(prior))
        left_SW = ratios_SW - own[place_SW]
        speed_S = np.median(left_SW, axis=1)
        distance_SW = np.abs(left_SW - speed_S[:, None])
        reach = max(_NUM_DEVIATIONS * float(np.median(distance_SW)), _LEAST_OUTLIER)
        weights_SW = (reach / np.maximum(distance_SW, reach)) ** look
    own_E[seen] = own
    near_W = left_SW[-1][distance_SW[-1] <= reach]
    # two kinds of steps, half and half: the median lies between them, near none
    speed = near_W.mean() if len(near_W) else speed_S[-1]
    return Correction(float(speed), own_E)


def _own_factors(
    place_SW: Ints, ratios_SW: Floats, weights_SW: Floats, num_seen: int, prior: float
) -> Floats:
    """Of the entries that were seen. The speed of each stretch is a free number, and eliminated.

    Stretches are laid twice, the second time from the middle of one to that of the next: entries
    that give way to each other at an end are compared too.
    """
    normal_EE, wanted_E = prior * np.eye(num_seen), np.zeros(num_seen)
    length = place_SW.shape[1]
    half = length // 2
    for start in (0, half) if len(place_SW) > 1 and half else (0,):
        end = place_SW.size - (length - start) % length
        place_N, ratios_N, weights_N = (
            values.reshape(-1)[start:end] for values in (place_SW, ratios_SW, weights_SW)
        )
        num_stretches, weighted_N = len(place_N) // length, weights_N * ratios_N
        cell_N = np.repeat(np.arange(num_stretches) * num_seen, length) + place_N
        weight_SE = np.bincount(cell_N, weights_N, num_stretches * num_seen).reshape(-1, num_seen)
        weight_S = weight_SE.sum(1)
        share_SE = weight_SE / weight_S[:, None]
        normal_EE += np.diag(weight_SE.sum(0)) - weight_SE.T @ share_SE
        wanted_E += np.bincount(place_N, weighted_N, num_seen)
        wanted_E -= share_SE.T @ weighted_N.reshape(-1, length).sum(1)
    return np.asarray(np.linalg.solve(normal_EE, wanted_E), dtype=np.float64)


class CostRatios:
    """Samples kept as log ratios by the entry of the table that they belong to."""

    def __init__(
        self, cost: StepCost, *, num_samples: int = 512, window: int = 32, prior: int = 4
    ) -> None:
        """`cost`: the profile. Of each part the last `num_samples` count."""
        self._cost = cost
        # entries of `verify` are numbered through, row after row
        lengths = [len(row.curve.sizes) for row in cost.verify]
        self._first = [0, *accumulate(lengths)]
        none = np.zeros(len(cost.draft.sizes))
        shares = [products_shares(row.curve.sizes, row.curve.seconds) for row in cost.verify]
        self._draft = _PartRatios(none, num_samples, window, prior)
        self._verify = _PartRatios(np.concatenate(shares), num_samples, window, prior)
        self._draft_entries: dict[int, tuple[int, Entry]] = {}
        self._verify_entries: dict[tuple[int, int], tuple[int, Entry]] = {}

    def add(self, sample: StepSample) -> None:
        """The newest sample."""
        if sample.part is Part.DRAFT:
            number, priced = self._priced_draft(sample)
            part = self._draft
        else:
            number, priced = self._priced_verify(sample)
            part = self._verify
        is_known = sample.seconds > 0.0 and priced > 0.0
        part.add(number, math.log(sample.seconds / priced) if is_known else 0.0)

    @property
    def speeds(self) -> Speeds:
        """Of passes, against the profile."""
        return self._verify.speeds

    def table(self, rows: Sequence[int]) -> StepCost:
        """The corrected table, with these rows of `verify` alone; see `StepCost.rows_around`."""
        drafts, verifies = self._draft.correction, self._verify.correction
        return replace(
            self._cost,
            draft=_corrected(self._cost.draft, drafts.speed, drafts.own_E),
            verify=tuple(
                replace(
                    self._cost.verify[i],
                    curve=_corrected(
                        self._cost.verify[i].curve,
                        verifies.speed,
                        verifies.own_E[self._first[i] : self._first[i + 1]],
                    ),
                )
                for i in rows
            ),
            sampled=self._sampled(drafts.speed, verifies.speed),
        )

    def _sampled(self, draft: float, verify: float) -> SampledCost | None:
        """What sampled requests cost more follows the machine."""
        if self._cost.sampled is None:
            return None
        return self._cost.sampled.scaled(math.exp(draft), math.exp(verify))

    def _priced_draft(self, sample: StepSample) -> tuple[int, float]:
        """The entry and what the profile says of the sample."""
        count, cost = sample.num_requests, self._cost
        found = self._draft_entries.get(count)
        if found is None:
            found = _nearest(cost.draft.sizes, count), cost.draft_entry(count)
            self._draft_entries[count] = found
        number, entry = found
        return number, cost.draft_in_context(entry, count, sample.context, sampled=sample.sampled)

    def _priced_verify(self, sample: StepSample) -> tuple[int, float]:
        count, tokens, cost = sample.num_requests, sample.num_tokens, self._cost
        found = self._verify_entries.get((count, tokens))
        if found is None:
            row = _nearest([row.num_requests for row in cost.verify], count)
            number = self._first[row] + _nearest(cost.verify[row].curve.sizes, tokens)
            found = number, cost.verify_entry(count, tokens)
            self._verify_entries[count, tokens] = found
        number, entry = found
        return number, cost.verify_in_context(
            entry, count, tokens, sample.context, sampled=sample.sampled
        )


class _PartRatios:
    """The ratios of one part."""

    def __init__(self, shares_E: Floats, num_samples: int, window: int, prior: int) -> None:
        """`shares_E`: of products in each entry."""
        # of a sample: its entry, and what is left of its log ratio without the tilt of the time
        self._items: deque[tuple[int, float]] = deque(maxlen=num_samples)
        self._shares_E, self._window, self._prior = shares_E, window, prior
        self._shares: list[float] = shares_E.tolist()
        self._tracker = SpeedTracker()
        self._correction: Correction | None = None

    def add(self, entry: int, ratio: float) -> None:
        self._items.append((entry, ratio - self._tracker.add(ratio, self._shares[entry])))
        self._correction = None

    @property
    def speeds(self) -> Speeds:
        return self._tracker.speeds

    @property
    def correction(self) -> Correction:
        """Own factors hold the tilt of now."""
        if self._correction is None:
            found = correction(
                np.array([entry for entry, _ in self._items], dtype=np.int64),
                np.array([ratio for _, ratio in self._items]),
                num_entries=len(self._shares),
                window=self._window,
                prior=self._prior,
            )
            own_E = found.own_E + tilts(self._shares_E, self.speeds.tilt)
            self._correction = Correction(found.speed, own_E)
        return self._correction


def _corrected(curve: CostCurve, speed: float, own_E: Floats) -> CostCurve:
    return curve.scaled(np.exp(speed + own_E).tolist())


def _nearest(sizes: Sequence[int], size: int) -> int:
    """The entry that is the same number of times larger or smaller."""
    return int(np.abs(np.log(np.maximum(sizes, 1)) - math.log(max(size, 1))).argmin())
