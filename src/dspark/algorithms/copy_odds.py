"""How likely a text goes on as it went on before, learnt from texts that did or did not.

A match of m tokens at the end of a text stood earlier in it too; its copy is what followed there.
Each match is an observation, whether its copy was proposed or not: the text itself tells later how
many of the tokens were right. So nothing has to be tried out, and what is learnt has no bias from
what was chosen. It knows counts, no token.
Letters: K tokens of a copy, G groups of match lengths.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

_FIRST_LENGTHS = (1, 3, 4, 6, 9, 13)
"""The shortest match of each group."""
_PRIOR = 4.0
"""Observations that the rule of succession is worth."""
_MOST = 512.0
"""Observations of a group at a position; then the older ones count half."""


class CopyOdds:
    """Conditional chances of the tokens of copies, by length of the match and position."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # an event seen m + k times in a row and never missed: odds of m + k + 1 to 1
        self._seen_GK: list[list[float]] = []
        self._hits_GK: list[list[float]] = []
        for length in _FIRST_LENGTHS:
            chances = [(length + k + 1) / (length + k + 2) for k in range(block_size)]
            self._seen_GK.append([_PRIOR] * block_size)
            self._hits_GK.append([_PRIOR * chance for chance in chances])

    @staticmethod
    def _group(match_length: int) -> int:
        return bisect_right(_FIRST_LENGTHS, match_length) - 1

    def logits(self, match_length: int) -> list[float]:
        """Of each of K tokens, that it is right if those before it are."""
        group = self._group(match_length)
        pairs = zip(self._hits_GK[group], self._seen_GK[group], strict=True)
        return [math.log(hits / (seen - hits)) for hits, seen in pairs]

    def survivals(self, match_length: int) -> list[float]:
        """Of each of K tokens, that it and those before it are right."""
        group = self._group(match_length)
        pairs = zip(self._hits_GK[group], self._seen_GK[group], strict=True)
        return list(accumulate((hits / seen for hits, seen in pairs), mul))

    def expected(self, match_length: int) -> float:
        """Tokens of a copy that are right before the first wrong one, on average."""
        return sum(self.survivals(match_length))

    def saw(self, match_length: int, num_right: int) -> None:
        """So many tokens of a copy were right, of K that the text has got since."""
        group = self._group(match_length)
        seen_K, hits_K = self._seen_GK[group], self._hits_GK[group]
        for k in range(min(num_right + 1, self._block_size)):
            if seen_K[k] >= _MOST:
                seen_K[k], hits_K[k] = seen_K[k] / 2.0, hits_K[k] / 2.0
            seen_K[k] += 1.0
            hits_K[k] += k < num_right


def num_right(copied: Sequence[int], text: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    for index, (token, other) in enumerate(zip(copied, text, strict=False)):
        if token != other:
            return index
    return min(len(copied), len(text))
