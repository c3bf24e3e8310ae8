"""Throughput against interactivity: what one policy gives for the same of the other (Figure 7).

It knows points, not how they were measured. Between two of them a server could run at any load, so
the frontier joins them by lines in logarithms; below its lowest load a policy serves as fast as
there; beyond its highest throughput, or its highest speed, it cannot serve at all.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load of one policy."""

    tokens_per_s: float
    per_user_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """The points that no other one beats in both: throughput rises, speed falls."""

    points: Sequence[Point]

    @classmethod
    def of(cls, points: Iterable[Point]) -> "Frontier":
        """The best of at least one point."""
        kept: list[Point] = []
        for point in sorted(points, key=lambda p: (-p.per_user_tokens_per_s, -p.tokens_per_s)):
            if not kept or point.tokens_per_s > kept[-1].tokens_per_s:
                kept.append(point)
        assert kept, "a frontier needs a point"
        return cls(kept)

    def per_user_at(self, tokens_per_s: float) -> float | None:
        """One user's speed while all together get this throughput; `None` beyond its reach."""
        rates = [p.tokens_per_s for p in self.points]
        speeds = [p.per_user_tokens_per_s for p in self.points]
        return _between(rates, speeds, tokens_per_s)

    def tokens_per_s_at(self, per_user_tokens_per_s: float) -> float | None:
        """Throughput while every user gets this speed; `None` if it is faster than any user's."""
        rates = [p.tokens_per_s for p in reversed(self.points)]
        speeds = [p.per_user_tokens_per_s for p in reversed(self.points)]
        return _between(speeds, rates, per_user_tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """One frontier over another, as shares: 0.6 is 60 % more."""

    per_user_gain_at_matched_throughput: Sequence[float | None]
    """At each point of the other policy, by rising throughput; `None` where ours cannot serve."""
    throughput_gain_at_middle_speed: float | None
    """At the middle (in logarithms) of the speeds that both reach."""
    middle_speed: float | None


def gains(ours: Iterable[Point], theirs: Iterable[Point]) -> Gains:
    """The two headline figures: speed at matched throughput, throughput at matched speed."""
    mine, others = Frontier.of(ours), Frontier.of(theirs)
    matched = [
        None if speed is None else speed / point.per_user_tokens_per_s - 1.0
        for point in others.points
        for speed in (mine.per_user_at(point.tokens_per_s),)
    ]
    low = max(f.points[-1].per_user_tokens_per_s for f in (mine, others))
    high = min(f.points[0].per_user_tokens_per_s for f in (mine, others))
    middle = math.sqrt(low * high) if low <= high else None
    gain = None
    if middle is not None:
        our_rate, their_rate = mine.tokens_per_s_at(middle), others.tokens_per_s_at(middle)
        assert our_rate is not None
        assert their_rate is not None
        gain = our_rate / their_rate - 1.0
    return Gains(
        per_user_gain_at_matched_throughput=matched,
        throughput_gain_at_middle_speed=gain,
        middle_speed=middle,
    )


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """y at x on lines in logarithms; that of the first x below it, nothing above the last."""
    if x > xs[-1] * (1.0 + 1e-12):
        return None
    if x <= xs[0]:
        return ys[0]
    after = next((i for i, known in enumerate(xs) if known >= x), len(xs) - 1)
    low, high = math.log(xs[after - 1]), math.log(xs[after])
    share = (math.log(x) - low) / (high - low)
    return math.exp((1.0 - share) * math.log(ys[after - 1]) + share * math.log(ys[after]))
