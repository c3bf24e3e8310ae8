"""Calibration in service: the scalings that came with the drafter, refitted to what rounds show.

It keeps recent rounds by sampling class. Every refit starts from the drafter's own scaling: one
that started from the scaling in force would count the same rounds twice.
Letters: R requests, K positions, C sampling classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.algorithms.calibration import Calibration, Logits, SamplingClass, Scaling
from dspark.algorithms.online_calibration import (
    PositionDrift,
    Window,
    find_drift,
    log_likelihood,
    refit,
)
from dspark.algorithms.ranking import Ints, Survivals
from dspark.kernels.planning import survivals

_CLASSES = tuple(SamplingClass)
_FIRST_ROUNDS, _FIRST_STEPS = 64, 16
"""Rounds of a class, and steps, before the first refit; then twice as many each time."""
_MOST_ROUNDS, _MOST_STEPS = 512, 256
"""Up to these: a refit costs about a step of its own."""
_CHANCE_GAIN = 6.0
"""Twice the gain in log-likelihood that a refit finds in noise; only what is beyond counts."""
_WINDOW = 2048
_HALF_LIFE = 1500.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of a step: `rows` of what belongs to all its requests."""

    rows: Sequence[int]
    logits_RK: Logits
    planned: Sequence[int]
    """Without what was explored."""
    verified: Sequence[int]
    accepted: Sequence[int]


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
        self._rounds: dict[SamplingClass, list[Rounds]] = {name: [] for name in _CLASSES}
        self._num_rounds = dict.fromkeys(_CLASSES, 0)
        self._steps_since = dict.fromkeys(_CLASSES, 0)
        self._num_refits = dict.fromkeys(_CLASSES, 0)
        for name in _CLASSES:
            self._use(name)

    @staticmethod
    def index(sampling_class: SamplingClass) -> int:
        """The number of a class, as `survival` takes it."""
        return _CLASSES.index(sampling_class)

    def survival(self, logits_RK: Logits, class_R: Ints) -> Survivals:
        """Calibrated a_k: [R, K]; `class_R` of length 1 holds for all."""
        of_R = int(class_R[0]) if len(class_R) == 1 else class_R
        return survivals(logits_RK, self._scale_CK[of_R], self._bias_CK[of_R])

    def survival_few(
        self, rows: Sequence[Sequence[float]], classes: Sequence[int]
    ) -> list[list[float]]:
        """The same of few requests, [R][K], without the cost of calls for arrays."""
        pairs = zip(rows, classes, strict=True)
        return [_survivals(row, self._terms[index]) for row, index in pairs]

    @staticmethod
    def believed(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        """Survivals of logits that are honest as they are, those of copies: [R][K]."""
        return [_survivals(row, [(1.0, 0.0)] * len(row)) for row in rows]

    def observe(self, rounds: "Rounds", index: int) -> bool:
        """The outcome of a step's rounds of one class; whether the class was fitted anew."""
        name = _CLASSES[index]
        self._rounds[name].append(rounds)
        self._num_rounds[name] += len(rounds.rows)
        self._steps_since[name] += 1
        growth = 2 ** min(self._num_refits[name], 4)
        if self._steps_since[name] < min(growth * _FIRST_STEPS, _MOST_STEPS):
            return False
        if self._num_rounds[name] < min(growth * _FIRST_ROUNDS, _MOST_ROUNDS):
            return False
        self._refit(name)
        return True

    def drift(self, sampling_class: SamplingClass) -> list[PositionDrift]:
        """Where recent rounds and the drafter's own scaling part."""
        return find_drift(self._windows[sampling_class], self.base.scaling(sampling_class))

    def _refit(self, name: SamplingClass) -> None:
        found, self._rounds[name], self._num_rounds[name] = self._rounds[name], [], 0
        self._windows[name] = self._windows[name].extended(
            np.concatenate([part.logits_RK[part.rows] for part in found]),
            planned=[part.planned[r] for part in found for r in part.rows],
            verified=[part.verified[r] for part in found for r in part.rows],
            accepted=[part.accepted[r] for part in found for r in part.rows],
        )
        self._steps_since[name] = 0
        self._num_refits[name] += 1
        self._use(name)

    def _use(self, name: SamplingClass) -> None:
        scaling, window = self.base.scaling(name), self._windows[name]
        if len(window.verified_N):
            scaling = _believed(scaling, refit(window, scaling, half_life=_HALF_LIFE), window)
        index = _CLASSES.index(name)
        self._scale_CK[index] = scaling.scales
        self._bias_CK[index] = scaling.biases
        self._terms[index] = list(zip(scaling.scales, scaling.biases, strict=True))


def _survivals(logits: Sequence[float], terms: Sequence[tuple[float, float]]) -> list[float]:
    survival, found = 1.0, []
    for logit, (scale, bias) in zip(logits, terms, strict=True):
        odds = scale * logit + bias
        # not a number: nothing survives from here on
        survival *= 1.0 / (1.0 + math.exp(-max(odds, -80.0))) if odds == odds else 0.0
        found.append(survival)
    return found


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
