"""Terms by how many requests draft: what gained most on the blocks of the last decisions.

A few blocks are soon said to be worth a number of their own, so decisions are remembered.
"""

from dspark.algorithms.foresight import Blocks
from dspark.algorithms.ranking import Floats
from dspark.algorithms.terms import Terms, best, gains

_SHARE = 0.25
"""Weight of the latest decision."""


class LiveTerms:
    """Mean gains of all terms."""

    def __init__(self) -> None:
        self._gains: dict[int, Floats] = {}

    def decided(self, blocks_RHK: Blocks, *, second: float, verify_B: Floats) -> Terms:
        """The terms for these requests, which draft, after their recent blocks."""
        found_PB = gains(blocks_RHK, second=second, verify_B=verify_B)
        known_PB = self._gains.setdefault(len(blocks_RHK), found_PB)
        known_PB += _SHARE * (found_PB - known_PB)
        return best(known_PB)
