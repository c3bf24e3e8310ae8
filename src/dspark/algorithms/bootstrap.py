"""Intervals for figures over prompts, by resampling the prompts. It knows sums, not their meaning.

Rounds of one prompt are not independent, prompts are: so whole prompts are drawn again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A two-sided 95% interval."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its length."""
        return (self.high - self.low) / 2.0


def ratio_interval(
    parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0
) -> Interval | None:
    """95% interval of sum(parts) / sum(wholes) over prompts: percentiles of 2000 resamples.

    `None` with fewer than two prompts: one prompt says nothing about others.
    """
    if len(parts) < 2:
        return None
    return _interval(_resampled_ratios(parts, wholes, _generator(seed)))


def mean_ratio_interval(
    tasks: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0
) -> Interval | None:
    """The same for the mean of several tasks' ratios; prompts are drawn again inside each task.

    `None` if a task has fewer than two prompts.
    """
    if not tasks or any(len(parts) < 2 for parts, _ in tasks):
        return None
    generator = _generator(seed)
    each = [_resampled_ratios(parts, wholes, generator) for parts, wholes in tasks]
    return _interval(torch.stack(each).mean(0))


def speed_ratio_interval(
    counts: Sequence[float],
    seconds: Sequence[float],
    other_counts: Sequence[float],
    other_seconds: Sequence[float],
    *,
    seed: int = 0,
) -> Interval | None:
    """The same for one speed over another, (counts / seconds) / (other counts / seconds), of the
    same prompts in the same order: each prompt is drawn with both of its measurements."""
    if len(counts) < 2:
        return None
    fast_B = _resampled_ratios(counts, seconds, _generator(seed))
    return _interval(fast_B / _resampled_ratios(other_counts, other_seconds, _generator(seed)))


def _resampled_ratios(
    parts: Sequence[float], wholes: Sequence[float], generator: torch.Generator
) -> Tensor:
    parts_P = torch.tensor(parts, dtype=torch.float64)
    wholes_P = torch.tensor(wholes, dtype=torch.float64)
    count = len(parts_P)
    drawn_BP = torch.randint(count, (NUM_RESAMPLES, count), generator=generator)
    return parts_P[drawn_BP].sum(1) / wholes_P[drawn_BP].sum(1)


def _interval(ratios_B: Tensor) -> Interval:
    low, high = torch.quantile(ratios_B, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low=low, high=high)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
