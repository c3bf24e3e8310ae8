"""Calibration: from what a drafter says about its tokens to chances that hold.
It knows numbers per position; it neither fits them nor knows how they were fitted.

    c_k' = sigmoid(scale_k * logit_k + bias_k)      a_k = c_1' * .. * c_k'

Sequential temperature scaling has scale 1 / T_k and no bias. The logit is that of a confidence
head, or for a drafter without one the log odds of its likeliest token (`confidence.py`). A scale
is never negative, so that the order of confidences at a position stays what it was.
Letters: R requests, K positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Survivals
from dspark.core import SamplingParams
from dspark.errors import ModelError

Logits = npt.NDArray[np.float32]


class SamplingClass(StrEnum):
    """Requests whose confidences are calibrated together: acceptance depends on temperature."""

    GREEDY = "greedy"
    COOL = "cool"  # temperature below 0.75
    WARM = "warm"

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """The class of a request."""
        if params.is_greedy:
            return cls("greedy")
        return cls("cool" if params.temperature < 0.75 else "warm")


_CLASSES = tuple(SamplingClass)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One scale and one bias for each position."""

    scales: tuple[float, ...]
    biases: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.scales) != len(self.biases) or not self.scales:
            raise ModelError(
                f"A calibration has {len(self.scales)} scales and {len(self.biases)} biases; it "
                "needs one of each for every position."
            )
        if not np.isfinite([*self.scales, *self.biases]).all() or min(self.scales) < 0.0:
            raise ModelError(
                f"A calibration has scales {self.scales} and biases {self.biases}; they must be "
                "finite, and no scale negative."
            )

    @classmethod
    def identity(cls, block_size: int) -> Self:
        """Believes the drafter's own confidences."""
        return cls(scales=(1.0,) * block_size, biases=(0.0,) * block_size)

    @classmethod
    def of_temperatures(cls, temperatures: Sequence[float]) -> Self:
        """c_k' = sigmoid(logit_k / T_k)."""
        if not all(t > 0.0 for t in temperatures):
            raise ModelError(f"The temperatures {tuple(temperatures)} must all be above 0.")
        return cls(scales=tuple(1.0 / t for t in temperatures), biases=(0.0,) * len(temperatures))

    @property
    def block_size(self) -> int:
        """K."""
        return len(self.scales)

    def survival(self, logits_RK: Logits) -> Survivals:
        """Calibrated a_k, float32 [R, K], falling along k; 0 from a logit on that is no number."""
        return scaled_survival(
            logits_RK,
            np.array(self.scales, dtype=np.float32),
            np.array(self.biases, dtype=np.float32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What travels with a drafter: a scaling for each sampling class that was measured."""

    scalings: Mapping[SamplingClass, Scaling]

    def __post_init__(self) -> None:
        sizes = {scaling.block_size for scaling in self.scalings.values()}
        if len(sizes) != 1:
            raise ModelError(
                f"A calibration must hold scalings of one block size, not of {sorted(sizes)}."
            )

    @classmethod
    def identity(cls, block_size: int) -> Self:
        """Believes the drafter's own confidences."""
        return cls(scalings={SamplingClass.WARM: Scaling.identity(block_size)})

    @property
    def block_size(self) -> int:
        """K."""
        return next(iter(self.scalings.values())).block_size

    def scaling(self, sampling_class: SamplingClass) -> Scaling:
        """That of the class, or of the measured class next to it."""
        wanted = _CLASSES.index(sampling_class)
        return min(self.scalings.items(), key=lambda item: abs(_CLASSES.index(item[0]) - wanted))[1]

    def survival(self, logits_RK: Logits, classes: Sequence[SamplingClass]) -> Survivals:
        """Calibrated a_k of requests of any classes: float32 [R, K]."""
        found = {name: self.scaling(name) for name in set(classes)}
        if len(found) == 1:
            return next(iter(found.values())).survival(logits_RK)
        scale_RK = np.array([found[name].scales for name in classes], dtype=np.float32)
        bias_RK = np.array([found[name].biases for name in classes], dtype=np.float32)
        return scaled_survival(
            logits_RK, scale_RK.reshape(logits_RK.shape), bias_RK.reshape(logits_RK.shape)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            "version": 1,
            "classes": {
                name.value: {"scales": list(s.scales), "biases": list(s.biases)}
                for name, s in self.scalings.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Our own format, or a list of temperatures as SGLang and TensorRT-LLM write it.

        Raises `ModelError` for anything else.
        """
        try:
            for key in ("temperatures", "sts_temperatures"):
                if key in data:
                    temperatures = [float(t) for t in data[key]]
                    return cls(scalings={SamplingClass.WARM: Scaling.of_temperatures(temperatures)})
            if data["version"] != 1:
                raise ModelError(
                    f"The calibration has version {data['version']!r}; run `dspark calibrate` "
                    "again."
                )
            return cls(
                scalings={
                    SamplingClass(name): Scaling(
                        scales=tuple(float(x) for x in entry["scales"]),
                        biases=tuple(float(x) for x in entry["biases"]),
                    )
                    for name, entry in data["classes"].items()
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"The calibration cannot be read ({error}); run `dspark calibrate` again."
            ) from error


def scaled_survival(logits_RK: Logits, scale: Logits, bias: Logits) -> Survivals:
    """Calibrated a_k, float32 [R, K]; `scale` and `bias` [K] or [R, K], see `Scaling.survival`.

    As few calls as it can be: a plan's time is that of its calls.
    """
    minus_scale, minus_bias = -np.atleast_2d(scale).T, -np.atleast_2d(bias).T
    # positions one after the other in memory: a survival is a product of whole rows then
    odds_KR = np.multiply(logits_RK.T, minus_scale, order="C")
    odds_KR += minus_bias
    with np.errstate(over="ignore"):
        np.exp(odds_KR, out=odds_KR)
    odds_KR += 1.0
    survival_KR: Survivals = np.divide(np.float32(1.0), odds_KR, out=odds_KR)
    np.multiply.accumulate(survival_KR, axis=0, out=survival_KR)
    least = survival_KR[-1:].min(initial=1.0)
    if least != least:  # no number: it has spread to the end of its request
        np.nan_to_num(survival_KR, copy=False)
    return survival_KR.T
