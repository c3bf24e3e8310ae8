"""Calibration in service: the scalings that came with the drafter, refitted to what rounds show.

It keeps recent rounds by sampling class. Every refit starts from the drafter's own scaling: one
that started from the scaling in force would count the same rounds twice.
Letters: R requests, K positions, C sampling classes.
"""

from collections.abc import Sequence

import numpy as np

from dspark.algorithms.calibration import Calibration, Logits, SamplingClass, scaled_survival
from dspark.algorithms.margin import uninformed
from dspark.algorithms.online_calibration import PositionDrift, Window, find_drift, refit
from dspark.algorithms.ranking import Ints, Survivals

_CLASSES = tuple(SamplingClass)
_ROUNDS_BETWEEN = 500
"""Rounds of a class between two refits, and steps: a refit costs about a step of its own."""
_STEPS_BETWEEN = 200
_WINDOW = 4096
_HALF_LIFE = 1500.0


class LiveCalibration:
    """Survivals from confidence logits, by the class of each request.

    A block without logits counts as logits of 0: what is left is a chance for each position,
    learnt from its outcomes.
    """

    def __init__(self, base: Calibration, *, share: float) -> None:
        self.base = base
        self._block_size = base.block_size
        self._scale_CK = np.zeros((len(_CLASSES), self._block_size), dtype=np.float32)
        self._bias_CK = np.zeros_like(self._scale_CK)
        self._windows = {
            name: Window.empty(self._block_size, share=share, size=_WINDOW) for name in _CLASSES
        }
        self._rounds: dict[SamplingClass, list[tuple[Logits, int, int, int]]] = {
            name: [] for name in _CLASSES
        }
        self._steps_since = dict.fromkeys(_CLASSES, 0)
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
        """Calibrated a_k: [R, K]."""
        return scaled_survival(logits_RK, self._scale_CK[class_R], self._bias_CK[class_R])

    def observe(
        self,
        logits_RK: Logits,
        classes: Sequence[int],
        *,
        planned: Sequence[int],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        """The outcome of a step's rounds; `planned` without what was explored."""
        rounds = zip(logits_RK, planned, verified, accepted, strict=True)
        for index, item in zip(classes, rounds, strict=True):
            self._rounds[_CLASSES[index]].append(item)
        for name in {_CLASSES[index] for index in classes}:
            self._steps_since[name] += 1
            is_due = self._steps_since[name] >= _STEPS_BETWEEN
            if is_due and len(self._rounds[name]) >= _ROUNDS_BETWEEN:
                self._refit(name)

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
        self._use(name)

    def _use(self, name: SamplingClass) -> None:
        scaling = self.base.scaling(name)
        if len(self._windows[name].verified_N):
            scaling = refit(self._windows[name], scaling, half_life=_HALF_LIFE)
        self._scale_CK[_CLASSES.index(name)] = scaling.scales
        self._bias_CK[_CLASSES.index(name)] = scaling.biases
