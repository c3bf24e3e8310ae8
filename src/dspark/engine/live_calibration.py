"""Calibration in service: the scalings that came with the drafter, refitted to what rounds show.

It keeps recent rounds by sampling class. Every refit starts from the drafter's own scaling: one
that started from the scaling in force would count the same rounds twice.
Letters: R requests, K positions, C sampling classes.
"""

import math
from collections.abc import Sequence

import numpy as np

from dspark.algorithms.calibration import (
    Calibration,
    Logits,
    SamplingClass,
    Scaling,
    scaled_survival,
)
from dspark.algorithms.margin import uninformed
from dspark.algorithms.online_calibration import (
    PositionDrift,
    Window,
    find_drift,
    log_likelihood,
    refit,
)
from dspark.algorithms.ranking import Ints, Survivals

_CLASSES = tuple(SamplingClass)
_FIRST_ROUNDS, _FIRST_STEPS = 64, 16
"""Rounds of a class, and steps, before the first refit; then twice as many each time."""
_MOST_ROUNDS, _MOST_STEPS = 512, 256
"""Up to these: a refit costs about a step of its own."""
_CHANCE_GAIN = 6.0
"""Twice the gain in log-likelihood that a refit finds in noise; only what is beyond counts."""
_WINDOW = 4096
_HALF_LIFE = 1500.0


class LiveCalibration:
    """Survivals from confidence logits, by the class of each request.

    A block without logits counts as logits of 0: what is left is a chance for each position,
    learnt from its outcomes.
    """

    NUM_CLASSES = len(_CLASSES)

    def __init__(self, base: Calibration, *, share: float) -> None:
        self.base = base
        self._block_size = base.block_size
        self._scale_CK = np.zeros((len(_CLASSES), self._block_size), dtype=np.float32)
        self._bias_CK = np.zeros_like(self._scale_CK)
        self._terms: dict[int, list[tuple[float, float]]] = {}
        self._windows = {
            name: Window.empty(self._block_size, share=share, size=_WINDOW) for name in _CLASSES
        }
        self._rounds: dict[SamplingClass, list[tuple[Logits, int, int, int]]] = {
            name: [] for name in _CLASSES
        }
        self._steps_since = dict.fromkeys(_CLASSES, 0)
        self._num_refits = dict.fromkeys(_CLASSES, 0)
        for name in _CLASSES:
            self._use(name)

    @classmethod
    def without_head(cls, block_size: int, *, share: float) -> "LiveCalibration":
        """For blocks that carry no logits."""
        scaling = uninformed(block_size)
        return cls(Calibration(scalings={SamplingClass.WARM: scaling}), share=share)

    @staticmethod
    def index(sampling_class: SamplingClass) -> int:
        """The number of a class, as `survival` takes it."""
        return _CLASSES.index(sampling_class)

    def survival(self, logits_RK: Logits, class_R: Ints) -> Survivals:
        """Calibrated a_k: [R, K]; `class_R` of length 1 holds for all."""
        return scaled_survival(logits_RK, self._scale_CK[class_R], self._bias_CK[class_R])

    def survival_few(
        self, rows: Sequence[Sequence[float]], classes: Sequence[int]
    ) -> list[list[float]]:
        """The same of few requests, [R][K], without the cost of calls for arrays."""
        return [self._of_one(row, index) for row, index in zip(rows, classes, strict=True)]

    def _of_one(self, logits: Sequence[float], index: int) -> list[float]:
        survival, found = 1.0, []
        for logit, (scale, bias) in zip(logits, self._terms[index], strict=True):
            odds = scale * logit + bias
            # not a number: nothing survives from here on
            survival *= 1.0 / (1.0 + math.exp(-max(odds, -80.0))) if odds == odds else 0.0
            found.append(survival)
        return found

    def observe(
        self,
        logits_RK: Logits,
        classes: Sequence[int],
        *,
        planned: Sequence[int],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> list[int]:
        """The outcome of a step's rounds; `planned` without what was explored.

        Returns the classes that were fitted anew.
        """
        rounds = zip(logits_RK, planned, verified, accepted, strict=True)
        for index, item in zip(classes, rounds, strict=True):
            self._rounds[_CLASSES[index]].append(item)
        fitted = []
        for name in {_CLASSES[index] for index in classes}:
            self._steps_since[name] += 1
            growth = 2 ** min(self._num_refits[name], 4)
            is_due = self._steps_since[name] >= min(growth * _FIRST_STEPS, _MOST_STEPS)
            if is_due and len(self._rounds[name]) >= min(growth * _FIRST_ROUNDS, _MOST_ROUNDS):
                self._refit(name)
                fitted.append(_CLASSES.index(name))
        return fitted

    def drift(self, sampling_class: SamplingClass) -> list[PositionDrift]:
        """Where recent rounds and the drafter's own scaling part."""
        return find_drift(self._windows[sampling_class], self.base.scaling(sampling_class))

    def _refit(self, name: SamplingClass) -> None:
        logits, planned, verified, accepted = zip(*self._rounds[name], strict=True)
        self._windows[name] = self._windows[name].extended(
            np.stack(logits), planned=planned, verified=verified, accepted=accepted
        )
        self._rounds[name] = []
        self._steps_since[name] = 0
        self._num_refits[name] += 1
        self._use(name)

    def _use(self, name: SamplingClass) -> None:
        scaling, window = self.base.scaling(name), self._windows[name]
        if len(window.verified_N):
            found = refit(window, scaling, half_life=_HALF_LIFE)
            scaling = _believed(scaling, found, window)
        index = _CLASSES.index(name)
        self._scale_CK[index] = scaling.scales
        self._bias_CK[index] = scaling.biases
        self._terms[index] = list(zip(scaling.scales, scaling.biases, strict=True))


def _believed(base: Scaling, found: Scaling, window: Window) -> Scaling:
    """The refit, drawn back to the base as far as its gain may be chance.

    A few unlucky rounds would otherwise switch drafting off, and then hardly any come to repair
    it.
    """
    gain = 2.0 * (log_likelihood(window, found) - log_likelihood(window, base))
    trust = max(0.0, 1.0 - _CHANCE_GAIN / gain) if gain > 0.0 else 0.0

    def mixed(old: Sequence[float], new: Sequence[float]) -> tuple[float, ...]:
        return tuple(a + trust * (b - a) for a, b in zip(old, new, strict=True))

    return Scaling(scales=mixed(base.scales, found.scales), biases=mixed(base.biases, found.biases))
