"""A machine with two speeds: that of reading its memory, and that of its products.
It knows seconds by size, and ratios of measured to expected seconds.

    seconds = (memory^q + products^q)^(1/q)

of a pass that reads its weights while it multiplies: the longer of the two counts, and near each
other both do. `memory` is the same for every number of tokens and shows in the smallest pass;
`products` grow with them and show where a pass takes longer than the smallest. Below that they
hide behind the memory, and are guessed from where they show.

Both speeds change apart on machines that others share: a pass of 4 tokens went from 10.0 to 7.4 ms
while one of 24 went from 18.6 to 20.9. One factor for all entries of a table is wrong then.
Letters: E entries of a curve.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dspark.algorithms.ranking import Floats

_SHARPNESS = 8.0
"""q."""
_SHOWS = 1.12
"""Times the smallest pass from which products show."""
_HIDDEN_POWER = 0.8
"""Products that do not show grow with this power of the size: part of them is for any size."""

# Variances of logs: what is not known at most, and of the tilt at first; of a sample; what comes
# with each sample, and with each one while they are far off.
_UNKNOWN_SPEED, _UNKNOWN_TILT, _FIRST_TILT = 0.5**2, 0.3**2, 0.1**2
_NOISE = 0.12**2
_DRIFT_SPEED, _DRIFT_TILT = 0.005**2, 0.002**2
_JUMP_SPEED, _JUMP_TILT = 0.1**2, 0.2**2
_ALL_OFF, _FAR_OFF = 0.1, 0.13
"""Mean log by which samples are off to one side, or to either, from which the machine is taken to
have changed: where its two speeds part, some samples are quicker and some slower."""
_LATEST = 0.25
"""Weight of the latest sample in these means."""
_NUM_DEVIATIONS = 3.0
"""Beyond these a sample pulls the less the further off it is."""
_MOST_TILT = 1.5
_MOST_MISSED = 0.25
"""That one sample counts for in the mean: an outlier is no change of the machine."""


def products_shares(sizes: Sequence[int], seconds: Sequence[float]) -> Floats:
    """Of a curve, by entry: (products / seconds)^q, from 0 to 1."""
    sizes_E, seconds_E = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    least = seconds_E[0]
    shows_E = seconds_E > _SHOWS * least
    if least <= 0.0 or not shows_E.any():
        return np.zeros(len(sizes_E))
    first = int(shows_E.argmax())
    relative_E = seconds_E / least
    powers_E = np.maximum(relative_E**_SHARPNESS - 1.0, 0.0)
    hidden_E = sizes_E[:first] / sizes_E[first]
    powers_E[:first] = powers_E[first] * hidden_E ** (_HIDDEN_POWER * _SHARPNESS)
    shares_E: Floats = np.minimum(powers_E / relative_E**_SHARPNESS, 1.0)
    return shares_E


def tilts(shares_E: Floats, tilt: float) -> Floats:
    """Log of what entries take longer if products alone become `exp(tilt)` times as slow: [E]."""
    more_E: Floats = np.log1p(shares_E * math.expm1(_SHARPNESS * tilt)) / _SHARPNESS
    return more_E


def _tilt_of(share: float, tilt: float) -> float:
    """`tilts` of one entry: a sample comes with every step, and an array costs more."""
    return math.log1p(share * math.expm1(_SHARPNESS * tilt)) / _SHARPNESS


class Speeds(NamedTuple):
    """Logs of what a machine takes, against a table."""

    speed: float
    """Passes that wait for the memory."""
    tilt: float
    """Products, beyond that."""


class SpeedTracker:
    """Follows both speeds from sample to sample: an extended Kalman filter over their logs.

    Samples of one kind tell nothing of the difference to the other, which stays what it was.
    """

    def __init__(self) -> None:
        self._speed = self._tilt = 0.0
        self._var_speed, self._var_tilt, self._covar = _UNKNOWN_SPEED, _FIRST_TILT, 0.0
        self._mean_missed = self._mean_far = 0.0

    @property
    def speeds(self) -> Speeds:
        """As the samples so far show them."""
        return Speeds(self._speed, self._tilt)

    def add(self, ratio: float, share: float) -> float:
        """Takes in the log of measured to expected seconds of an entry with this share; returns
        what the tilt of now makes of it."""
        var_speed, var_tilt = self._var_speed + _DRIFT_SPEED, self._var_tilt + _DRIFT_TILT
        if abs(self._mean_missed) > _ALL_OFF or self._mean_far > _FAR_OFF:
            var_speed, var_tilt = var_speed + _JUMP_SPEED, var_tilt + _JUMP_TILT
        var_speed, var_tilt = min(var_speed, _UNKNOWN_SPEED), min(var_tilt, _UNKNOWN_TILT)
        power = math.exp(_SHARPNESS * self._tilt)
        slope = share * power / (1.0 + share * (power - 1.0))
        missed = ratio - self._speed - _tilt_of(share, self._tilt)
        bounded = min(max(missed, -_MOST_MISSED), _MOST_MISSED)
        self._mean_missed += _LATEST * (bounded - self._mean_missed)
        self._mean_far += _LATEST * (abs(bounded) - self._mean_far)
        with_speed = var_speed + slope * self._covar
        with_tilt = self._covar + slope * var_tilt
        variance = with_speed + slope * with_tilt + _NOISE
        reach = _NUM_DEVIATIONS * math.sqrt(variance)
        if abs(missed) > reach:
            missed *= (reach / abs(missed)) ** 3
        pull = missed / variance
        self._speed += with_speed * pull
        self._tilt = min(max(self._tilt + with_tilt * pull, -_MOST_TILT), _MOST_TILT)
        self._var_speed = var_speed - with_speed**2 / variance
        self._covar -= with_speed * with_tilt / variance
        self._var_tilt = var_tilt - with_tilt**2 / variance
        return _tilt_of(share, self._tilt)
