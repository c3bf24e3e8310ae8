"""Counts of values by size, cheap enough for every token. It knows no metric's name."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values lie at or below each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Take in a value that was seen so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, as Prometheus writes both."""
        names = [*map(str, self.bounds), "+Inf"]
        found, total = [], 0
        for name, count in zip(names, list(self._counts), strict=True):
            total += count
            found.append((name, float(total)))
        return found
