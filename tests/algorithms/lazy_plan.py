"""Slow references of the prefix scheduler: one that cannot see the future, one that tries all.

`LazyBlock` reveals a confidence only after the token before it was admitted: a plan made from it
is non-anticipating by construction, since the token it would have to know is not there yet.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np


@dataclass
class LazyBlock:
    """`confidence(r, k)` of the token in slot k of request r, asked for at most once each."""

    confidence: Callable[[int, int], float]
    caps: Sequence[int]
    asked: list[tuple[int, int]] = field(default_factory=list)

    def admitted(self, least: Sequence[int] | None = None):
        """Yields (request, survival) in the order of admission.

        The caller goes on only if it admits what it was given.
        """
        survivals = [np.float32(1.0) for _ in self.caps]
        for slot in range(max(self.caps, default=0)):
            for r in range(len(self.caps)):
                if least is not None and slot < min(least[r], self.caps[r]):
                    survivals[r] *= self._ask(r, slot)
                    yield r, float(survivals[r])
        heap: list[tuple[float, int, int]] = []
        for r, cap in enumerate(self.caps):
            self._push(heap, survivals, r, min(least[r], cap) if least is not None else 0)
        while heap:
            negated, slot, r = heapq.heappop(heap)
            yield r, -negated
            self._push(heap, survivals, r, slot + 1)

    def _push(self, heap, survivals, r: int, slot: int) -> None:
        if slot < self.caps[r]:
            survivals[r] = survivals[r] * self._ask(r, slot)
            if survivals[r] > 0:
                heapq.heappush(heap, (-float(survivals[r]), slot, r))

    def _ask(self, r: int, slot: int) -> np.float32:
        self.asked.append((r, slot))
        return np.float32(self.confidence(r, slot))


def lazy_causal(block: LazyBlock, seconds: Sequence[float], num_certain: int) -> list[int]:
    """Algorithm 1, line by line."""
    lengths = [0] * len(block.caps)
    expected = 0.0
    best = num_certain / seconds[0]
    for total, (r, survival) in enumerate(block.admitted(), start=1):
        expected += survival
        if total == len(seconds) or (expected + num_certain) / seconds[total] <= best:
            break
        best = (expected + num_certain) / seconds[total]
        lengths[r] += 1
    return lengths


def lazy_admit(block: LazyBlock, budget: int, least: Sequence[int] | None = None) -> list[int]:
    """The top `budget` tokens, one after the other."""
    lengths = [0] * len(block.caps)
    for total, (r, _) in enumerate(block.admitted(least)):
        if total == budget:
            break
        lengths[r] += 1
    return lengths


def all_lengths(caps: Sequence[int]) -> list[tuple[int, ...]]:
    return list(product(*(range(cap + 1) for cap in caps)))


def rate_of(lengths: Sequence[int], survival_RK, seconds: Sequence[float]) -> float:
    """Theta of any lengths, the sum of the paper."""
    tokens = sum(1.0 + float(row[:n].sum()) for row, n in zip(survival_RK, lengths, strict=True))
    return tokens / seconds[sum(lengths)]
