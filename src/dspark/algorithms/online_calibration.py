"""Calibration while serving: from rounds of which only a part was verified.
It knows recent rounds and fits a scaling to them; it holds no state that changes.

The plan decides by confidence what is verified. Three things keep the fit honest (method 6):

    observed only   position k counts in rounds that accepted 1..k-1 and verified k; a token that
                    was trimmed is no rejection
    exploration     a small share of rounds is verified in full, drawn before the block is; so no
                    position goes unobserved
    weights         positions that only exploration could show stand for the many that were
                    trimmed: they weigh 1 / share, up to a limit that keeps the variance at bay

Old rounds fade. The fit is a logistic one of outcomes on logits: first one correction of the
drafter's own scaling for all positions together, then each position's, pulled towards that.
Letters: N rounds, K positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from dspark.algorithms.calibration import Logits, Scaling
from dspark.algorithms.ranking import Floats, Ints
from dspark.errors import InputError

MAX_SHARE = 0.1
_MOST_WEIGHT = 2.0
# How strongly a fit is pulled towards what was believed before; about that many observations.
_PRIOR = 20.0
_NUM_NEWTON_STEPS = 50
_NEAR_ENOUGH = 1e-5
# A gap is drift if noise does not explain it and it is large enough to matter.
_NUM_ERRORS = 4.0
_LEAST_GAP = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Recent rounds, the newest last. Frozen: `extended` makes a new one."""

    logits_NK: Logits
    planned_N: Ints
    """What the plan wanted to verify, exploration aside."""
    verified_N: Ints
    accepted_N: Ints
    share: float
    """Chance of a round to be verified in full instead."""
    size: int = 8192
    """Rounds that are remembered."""

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= MAX_SHARE:
            raise InputError(
                f"The share of exploration is {self.share!r}, but it must lie in (0, {MAX_SHARE}]."
            )

    @classmethod
    def empty(cls, block_size: int, *, share: float, size: int = 8192) -> Self:
        """Nothing observed yet."""
        none = np.zeros(0, dtype=np.int64)
        return cls(
            logits_NK=np.zeros((0, block_size), dtype=np.float32),
            planned_N=none,
            verified_N=none,
            accepted_N=none,
            share=share,
            size=size,
        )

    def extended(
        self,
        logits_NK: Logits,
        *,
        planned: Sequence[int] | Ints,
        verified: Sequence[int] | Ints,
        accepted: Sequence[int] | Ints,
    ) -> Self:
        """With further rounds; those beyond `size` are forgotten.

        `verified` counts the positions that were verified and do not stand behind the end of the
        answer.
        """
        return type(self)(
            logits_NK=np.concatenate([self.logits_NK, logits_NK])[-self.size :],
            planned_N=np.concatenate([self.planned_N, planned])[-self.size :].astype(np.int64),
            verified_N=np.concatenate([self.verified_N, verified])[-self.size :].astype(np.int64),
            accepted_N=np.concatenate([self.accepted_N, accepted])[-self.size :].astype(np.int64),
            share=self.share,
            size=self.size,
        )

    def weights_at(self, slot: int, half_life: float) -> Floats:
        """What an observation of a position weighs: rarely seen ones more, old ones less: [N]."""
        weight_N = np.where(self.planned_N > slot, 1.0, min(1.0 / self.share, _MOST_WEIGHT))
        faded_N: Floats = weight_N * _fading(len(weight_N), half_life)
        return faded_N


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionDrift:
    """Predicted against observed acceptance at position k, given that 1..k-1 were accepted."""

    k: int
    num_observed: int
    predicted: float
    observed: float
    is_drift: bool


def next_explored(seed: int, start: int, share: float) -> int:
    """The next round of a request, `start` or later, that is verified in full.

    A function of (seed, start) alone: nothing of any block takes part in the draw, so that
    exploration is exact under any coupling. The gap is geometric: drawn anew behind each explored
    round, every round is explored with chance `share`, whatever happened in the others.
    """
    drawn = (_mixed(_mixed(seed) + start) + 1) / 2**64
    return start + int(math.log(drawn) / math.log1p(-share))


def refit(window: Window, base: Scaling, *, half_life: float = math.inf) -> Scaling:
    """The scaling that explains the window best.

    `base` is the one that the drafter came with, and is held to where there is little to go by;
    not the one in force: that rests on the same window, which would then count again with every
    fit. An observation loses half of its weight with every `half_life` rounds. A position whose
    outcomes would turn the order of its confidences round keeps scale 0: they tell nothing.
    """
    observations = [_Observations.of(window, slot, half_life) for slot in range(base.block_size)]
    start = list(zip(base.scales, base.biases, strict=True))
    # What shifts all positions alike is learned from all of them: deep ones are seen seldom.
    scale, bias = fit_logistic(
        np.concatenate([s * o.logits_N + b for o, (s, b) in zip(observations, start, strict=True)]),
        np.concatenate([o.is_accepted_N for o in observations]),
        np.concatenate([o.weights_N for o in observations]),
        prior=(1.0, 0.0),
    )
    found = [
        fit_logistic(o.logits_N, o.is_accepted_N, o.weights_N, prior=(scale * s, scale * b + bias))
        for o, (s, b) in zip(observations, start, strict=True)
    ]
    return Scaling(scales=tuple(s for s, _ in found), biases=tuple(b for _, b in found))


def log_likelihood(window: Window, scaling: Scaling) -> float:
    """Of what the window's rounds showed, by the chances that the scaling gives."""
    total = 0.0
    for slot in range(scaling.block_size):
        seen = _Observations.of(window, slot, math.inf)
        chance_N = _sigmoid(scaling.scales[slot] * seen.logits_N + scaling.biases[slot])
        chance_N = np.clip(chance_N, 1e-6, 1.0 - 1e-6)
        total += float(np.log(np.where(seen.is_accepted_N, chance_N, 1.0 - chance_N)).sum())
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observations:
    """Outcomes of one position in the rounds that show them."""

    logits_N: Floats
    is_accepted_N: npt.NDArray[np.bool_]
    weights_N: Floats

    @classmethod
    def of(cls, window: Window, slot: int, half_life: float) -> Self:
        seen_N = _is_observed(window, slot)
        return cls(
            logits_N=window.logits_NK[seen_N, slot].astype(np.float64),
            is_accepted_N=window.accepted_N[seen_N] > slot,
            weights_N=window.weights_at(slot, half_life)[seen_N],
        )


def find_drift(window: Window, scaling: Scaling) -> list[PositionDrift]:
    """Where what happened and what the scaling foretells part, position by position."""
    found = []
    for slot in range(scaling.block_size):
        seen_N = _is_observed(window, slot)
        count = int(seen_N.sum())
        if count == 0:
            continue
        logits_N = window.logits_NK[seen_N, slot].astype(np.float64)
        predicted_N = _sigmoid(scaling.scales[slot] * logits_N + scaling.biases[slot])
        observed = float((window.accepted_N[seen_N] > slot).mean())
        predicted = float(predicted_N.mean())
        error = math.sqrt(float((predicted_N * (1.0 - predicted_N)).sum())) / count
        gap = abs(observed - predicted)
        found.append(
            PositionDrift(
                k=slot + 1,
                num_observed=count,
                predicted=predicted,
                observed=observed,
                is_drift=gap > max(_LEAST_GAP, _NUM_ERRORS * error),
            )
        )
    return found


def fit_logistic(
    logits_N: Floats,
    is_accepted_N: npt.NDArray[np.bool_],
    weights_N: Floats,
    *,
    prior: tuple[float, float],
) -> tuple[float, float]:
    """Scale >= 0 and bias of P(accepted) = sigmoid(scale * logit + bias), by Newton's method.

    A quadratic pull towards `prior` keeps it finite where all outcomes are equal.
    """
    centre = np.array(prior)
    found = centre.copy()
    features_N2 = np.stack([logits_N, np.ones_like(logits_N)], axis=1)
    for _ in range(_NUM_NEWTON_STEPS):
        chance_N = _sigmoid(features_N2 @ found)
        gradient = features_N2.T @ (weights_N * (is_accepted_N - chance_N))
        gradient -= _PRIOR * (found - centre)
        curvature_N = weights_N * chance_N * (1.0 - chance_N)
        hessian = (features_N2 * curvature_N[:, None]).T @ features_N2 + _PRIOR * np.eye(2)
        step = np.clip(np.linalg.solve(hessian, gradient), -2.0, 2.0)
        found += step
        if np.abs(step).max() < _NEAR_ENOUGH:
            break
    if found[0] >= 0.0:
        return float(found[0]), float(found[1])
    share = float((weights_N * is_accepted_N).sum() + 1.0) / float(weights_N.sum() + 2.0)
    return 0.0, math.log(share / (1.0 - share))


@lru_cache(maxsize=8)
def _fading(num_rounds: int, half_life: float) -> Floats:
    """What rounds weigh by their age, the newest last: [N]."""
    faded_N: Floats = 0.5 ** (np.arange(num_rounds)[::-1] / half_life)
    faded_N.flags.writeable = False
    return faded_N


def _mixed(value: int) -> int:
    """SplitMix64: every bit of the result depends on every bit of the value."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def _is_observed(window: Window, slot: int) -> npt.NDArray[np.bool_]:
    seen_N: npt.NDArray[np.bool_] = (window.verified_N > slot) & (window.accepted_N >= slot)
    return seen_N


def _sigmoid(logits: Floats) -> Floats:
    values: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
    return values
