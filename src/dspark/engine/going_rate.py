"""What a second of the service is worth, by the number of requests: the rate that it goes at.

The worth is the highest rate that can be had in the long run (`algorithms.foresight`). It is kept
as a multiple of plain decoding's, so that it follows a machine that turns slow, and is mended
with each decision: the rate that the decision is expected to reach is the next estimate.
"""

from dataclasses import dataclass

_SHARE = 0.25
"""Weight of the latest decision."""
_FIRST_LOOKS = 3
"""Estimates of a number of requests that is new, one made from the other at once."""


@dataclass(slots=True)
class _Known:
    lift: float
    budget: float
    num_looks: int = 0


class GoingRate:
    """Lift over plain decoding and the usual budget, by the number of requests."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def is_new(self, num_requests: int) -> bool:
        """Whether the next estimate should follow at once."""
        return self._of(num_requests).num_looks < _FIRST_LOOKS

    def lift(self, num_requests: int) -> float:
        """The rate that can be had over that of plain decoding, at least 1."""
        return self._of(num_requests).lift

    def budget(self, num_requests: int) -> float:
        """Drafted tokens that a step usually verifies."""
        return self._of(num_requests).budget

    def decided(self, num_requests: int, *, lift: float, budget: float) -> None:
        """What a decision is expected to reach."""
        known = self._of(num_requests)
        share = 1.0 if known.num_looks < _FIRST_LOOKS else _SHARE
        known.num_looks += 1
        known.lift += share * (max(lift, 1.0) - known.lift)
        known.budget += share * (budget - known.budget)

    def _of(self, num_requests: int) -> _Known:
        return self._known.setdefault(num_requests, _Known(lift=1.0, budget=float(num_requests)))
