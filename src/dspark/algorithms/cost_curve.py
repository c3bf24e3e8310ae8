"""One measured curve: seconds of something by its size, at the sizes that are really executed.
It knows sizes and seconds, not what is executed.

Execution may pad: up to `padded_up_to` (captured graphs) any size runs as the next listed one, so
the curve is a staircase there and no price in between is invented. Above, it is a line between
neighbours, and behind the last one the line of the last two. Shelves that are not padding (tiles
of a kernel) stay shelves if both their ends were measured.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Floats
from dspark.errors import ModelError

# Of a normal distribution: from the median absolute deviation to the standard deviation, and from
# the standard error of a mean to that of a median.
_MAD_TO_DEVIATION = 1.4826
_MEDIAN_OVER_MEAN = 1.2533
# A fall between two sizes that this many standard errors explain is noise.
_NUM_ERRORS = 3.0


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Seconds by size; all tuples have one entry for each size."""

    sizes: tuple[int, ...]
    """Rising."""
    seconds: tuple[float, ...]
    errors: tuple[float, ...]
    """Standard error of each entry of `seconds`."""
    padded_up_to: int = 0
    """Sizes up to this one run as the next listed size."""

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 0:
            raise ModelError(f"The sizes of a cost curve must rise from 0 on, not {self.sizes}.")
        if not len(self.sizes) == len(self.seconds) == len(self.errors):
            raise ModelError(
                f"A cost curve of {len(self.sizes)} sizes has {len(self.seconds)} times and "
                f"{len(self.errors)} errors; it needs one of each."
            )
        for value in (*self.seconds, *self.errors):
            if not (math.isfinite(value) and value >= 0.0):
                raise ModelError(f"A cost curve holds {value!r} s; profile the machine again.")

    @classmethod
    def free(cls) -> Self:
        """The curve of something that costs nothing."""
        return cls(sizes=(1,), seconds=(0.0,), errors=(0.0,))

    @classmethod
    def of_samples(cls, samples: Mapping[int, Sequence[float]], *, padded_up_to: int = 0) -> Self:
        """Medians of repeated measurements by size, falls that are mere noise levelled.

        A cost that really falls with the size is kept: it is monotone only where the data are.
        """
        sizes = tuple(sorted(samples))
        medians = [statistics.median(samples[size]) for size in sizes]
        errors = [_median_error(samples[size]) for size in sizes]
        return cls(
            sizes=sizes,
            seconds=tuple(_levelled(medians, errors)),
            errors=tuple(errors),
            padded_up_to=padded_up_to,
        )

    def at(self, sizes_N: npt.NDArray[np.int64]) -> Floats:
        """Seconds at any sizes: [N]; see the top for what lies between the measured ones."""
        last = self.sizes[-1]
        found_N: Floats = self._seconds_by_size[np.minimum(sizes_N, last)]
        if sizes_N.max(initial=0) > last:
            found_N = found_N + self._last_slope * np.maximum(sizes_N - last, 0)
        return found_N

    @cached_property
    def _seconds_by_size(self) -> Floats:
        """Seconds of every size from 0 to the last one: a plan looks up thousands of them."""
        sizes, seconds = np.asarray(self.sizes), np.asarray(self.seconds)
        every_size = np.arange(self.sizes[-1] + 1)
        found: Floats = np.interp(every_size, sizes, seconds)
        if self.padded_up_to == 0:
            return found
        is_open = sizes > self.padded_up_to
        if is_open.any():
            found = np.interp(every_size, sizes[is_open], seconds[is_open])
        else:
            found = np.full(len(every_size), seconds[-1])
        is_padded = every_size <= self.padded_up_to
        found[is_padded] = seconds[np.searchsorted(sizes, every_size[is_padded])]
        return found

    @cached_property
    def _last_slope(self) -> float:
        if len(self.sizes) == 1:
            return 0.0
        rise = self.seconds[-1] - self.seconds[-2]
        return max(0.0, rise / (self.sizes[-1] - self.sizes[-2]))

    def scaled(self, factors: Sequence[float]) -> Self:
        """The curve with each entry, and its error, times its own factor."""
        return replace(
            self,
            seconds=tuple(s * f for s, f in zip(self.seconds, factors, strict=True)),
            errors=tuple(e * f for e, f in zip(self.errors, factors, strict=True)),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            "sizes": list(self.sizes),
            "seconds": list(self.seconds),
            "errors": list(self.errors),
            "padded_up_to": self.padded_up_to,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises `ModelError` for what `to_json` cannot have written."""
        try:
            return cls(
                sizes=tuple(int(size) for size in data["sizes"]),
                seconds=tuple(float(value) for value in data["seconds"]),
                errors=tuple(float(value) for value in data["errors"]),
                padded_up_to=int(data["padded_up_to"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"A cost curve cannot be read ({error}); profile again.") from error


def _median_error(samples: Sequence[float]) -> float:
    centre = statistics.median(samples)
    deviation = _MAD_TO_DEVIATION * statistics.median(abs(x - centre) for x in samples)
    return _MEDIAN_OVER_MEAN * deviation / math.sqrt(len(samples))


def _levelled(seconds: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Pools neighbours that fall by no more than noise explains (adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, error, sizes in the pool
    for value, error in zip(seconds, errors, strict=True):
        pools.append((value, error, 1))
        while len(pools) > 1:
            (left, left_error, left_count), (right, right_error, right_count) = pools[-2:]
            fall = left - right
            if fall <= 0.0 or fall > _NUM_ERRORS * math.hypot(left_error, right_error):
                break
            count = left_count + right_count
            mean = (left * left_count + right * right_count) / count
            pools[-2:] = [(mean, max(left_error, right_error), count)]
    return [mean for mean, _, count in pools for _ in range(count)]
