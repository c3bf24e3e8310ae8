"""What may be spent to notice that another choice would pay: drafts while they are not expected to
(UC-144), and steps without any while they are.

All probes together lose at most `LOSS` of the tokens that the service commits, whatever the number
of requests. That is saved up before: a probe of eight requests can take as long as two plain steps,
which shows in the second in which it is made. What counts is what a probe really lost; what it lost
beyond what was expected has to be earned before the next one.
"""

from collections.abc import Sequence

LOSS = 0.003
SPACING = 8
"""Rounds between two probes of a request, at least."""
MOST_PROBED = 8
"""Requests of one probe, at most: the drafter's first request costs more than the others."""
PROBE = 2
"""Steps of a probe where nobody drafts besides: the first finds its weights out of the caches, and
the second shows what drafting costs."""
_MOST_SAVED = 4.0
"""Tokens that are saved up, if no dearer probe is waited for."""

LOOK = 4
"""Plain steps of a look."""
_FIRST_LOOK, _LAST_LOOK = 16, 256
"""Drafting steps from one look at plain ones to the next: the first time, and later on."""
_LOOK_LOSS = 0.004
"""Share of the tokens that looks but the first may cost, by what drafting seems to bring."""


class Probes:
    """An allowance in tokens."""

    def __init__(self) -> None:
        self._saved = 0.0
        self._most = _MOST_SAVED

    def earn(self, tokens: int) -> None:
        """So many tokens were committed."""
        self._saved = min(self._saved + LOSS * tokens, max(self._most, self._saved))

    def lost(self, tokens: float) -> None:
        """A probe lost so many; a lucky one earns nothing."""
        self._saved -= max(tokens, 0.0)

    def affords(self, tokens: float) -> bool:
        """Whether a probe may be expected to lose so many; if not, they are saved up for."""
        self._most = max(tokens, _MOST_SAVED)
        return self._saved >= tokens


def candidates(drafted_at: Sequence[int | None], rounds: Sequence[int]) -> list[int]:
    """Indices of those who have not drafted for a while: new ones, then the longest. Of the new
    ones the youngest come first: what a drafter has to make up for grows with every round."""
    found = [
        index
        for index, (last, now) in enumerate(zip(drafted_at, rounds, strict=True))
        if last is None or now - last >= SPACING
    ]

    def place(index: int) -> tuple[bool, int]:
        last, now = drafted_at[index], rounds[index]
        return (False, now) if last is None else (True, last - now)

    return sorted(found, key=place)


class PlainLooks:
    """When a service that drafts should decode plainly for a while.

    A pass without drafts costs less than the corrections of passes with drafts let it seem, and
    only such passes show it. Numbers of requests are told apart by powers of two.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._wait: dict[int, int] = {}

    def is_due(self, num_requests: int, *, lift: float, num_steps: int) -> bool:
        """Whether to look now instead of drafting for so many steps more at this gain."""
        key = num_requests.bit_length()
        self._steps[key] = self._steps.get(key, 0) + num_steps
        wait = self._wait.get(key, _FIRST_LOOK)
        if wait > _FIRST_LOOK:
            wait = max(wait, round(LOOK * (1.0 - 1.0 / lift) / _LOOK_LOSS))
        if self._steps[key] <= wait:
            return False
        self._steps[key], self._wait[key] = 0, min(4 * wait, _LAST_LOOK)
        return True
