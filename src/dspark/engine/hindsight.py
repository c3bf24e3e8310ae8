"""Whether drafted tokens survive as often as was said: the quick check beside the slow refits.

A drafter that claims too much is believed less at once: its survivals count with the factor that
its last tokens leave likely. Claiming too little is for calibration to mend.
"""

import math

_MEMORY = 0.9
"""What is left of older blocks' weight after another one."""
_CHANCE = 2.0
"""Standard deviations that are put down to luck."""
_SPREAD = 2.0
"""Variance of a block's accepted tokens over that of as many independent ones, about."""


class Hindsight:
    """Expected and accepted tokens of one kind of requests."""

    def __init__(self) -> None:
        self._expected = 0.0
        self._accepted = 0.0

    def add(self, expected: float, accepted: float) -> None:
        """What a step verified was expected to bring so many tokens, and brought so many."""
        self._expected = _MEMORY * self._expected + expected
        self._accepted = _MEMORY * self._accepted + accepted

    def forget(self) -> None:
        """Survivals are said in another way from now on."""
        self._expected = self._accepted = 0.0

    @property
    def trust(self) -> float:
        """Factor on survivals, at most 1: the most that the outcomes leave likely."""
        if self._expected == 0.0:
            return 1.0
        half = 0.5 * _SPREAD * _CHANCE**2
        most = self._accepted + half + math.sqrt(2.0 * half * self._accepted + half**2)
        return min(1.0, most / self._expected)
