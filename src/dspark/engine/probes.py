"""What may be spent on drafts that are not expected to pay, to notice when they would (UC-144).

All probes together lose at most `LOSS` of the tokens that the service commits, whatever the number
of requests, and `_MOST_SAVED` tokens or one probe besides. What counts is what a probe really lost.
"""

from collections.abc import Sequence

LOSS = 0.005
SPACING = 8
"""Rounds between two probes of a request, at least."""
MOST_PROBED = 8
"""Requests of one probe, at most: the drafter's first request costs more than the others."""
_MOST_SAVED = 4.0


class Probes:
    """An allowance in tokens."""

    def __init__(self) -> None:
        self._saved = 0.0

    def earn(self, tokens: int) -> None:
        """So many tokens were committed."""
        self._saved = min(self._saved + LOSS * tokens, max(_MOST_SAVED, self._saved))

    def lost(self, tokens: float) -> None:
        """A probe lost so many; a lucky one earns nothing."""
        self._saved -= max(tokens, 0.0)

    def affords(self, tokens: float) -> bool:
        """Whether a probe may be expected to lose so many."""
        return self._saved >= min(tokens, _MOST_SAVED)


def candidates(drafted_at: Sequence[int | None], rounds: Sequence[int]) -> list[int]:
    """Indices of those who have not drafted for a while: new ones, then the longest."""
    ages = [
        now + 2**30 if last is None else now - last
        for last, now in zip(drafted_at, rounds, strict=True)
    ]
    found = [index for index, age in enumerate(ages) if age >= SPACING]
    return sorted(found, key=lambda index: -ages[index])
