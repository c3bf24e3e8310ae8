"""Survivals of recent blocks by request: what a plan knows before the next block is drawn.

A request that is new, or has not drafted yet, stands in with recent blocks of any requests.
Letters: H blocks remembered, R requests, K positions.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Survivals

DEPTH = 8
"""Blocks remembered of each request: about a phrase."""
# What the first request of all is taken for: confident, so that drafting is tried.
_FIRST_CONFIDENCE = 0.8


class SurvivalHistory:
    """The last `DEPTH` rows of each slot, and the last rows of all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        first_K = np.cumprod(np.full(block_size, _FIRST_CONFIDENCE, dtype=np.float32))
        self._recent_HK = np.tile(first_K, (DEPTH, 1))
        self._rows = np.zeros((0, DEPTH, block_size), dtype=np.float32)
        self._next = np.zeros(0, dtype=np.int64)
        self._next_recent = 0
        self._pending: list[tuple[int, Sequence[float]]] = []

    def begin(self, slot: int) -> None:
        """A new request takes this slot."""
        self._write()
        if slot >= len(self._rows):
            more = slot + 1 - len(self._rows)
            empty = np.zeros((more, DEPTH, self._block_size), dtype=np.float32)
            self._rows = np.concatenate([self._rows, empty])
            self._next = np.concatenate([self._next, np.zeros(more, dtype=np.int64)])
        self._rows[slot] = self._recent_HK
        self._next[slot] = 0

    def add(self, slots: Sequence[int], survival_RK: Survivals) -> None:
        """The rows of a block that was drawn for these requests."""
        self._write()
        self._rows[slots, self._next[slots]] = survival_RK
        self._next[slots] = (self._next[slots] + 1) % DEPTH
        for row in survival_RK[-DEPTH:]:
            self._remember(row)

    def add_few(self, rows: Sequence[tuple[int, Sequence[float]]]) -> None:
        """(slot, row) of a block of few requests; written when somebody asks."""
        self._pending.extend(rows)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        for slot, row in pending:
            self._rows[slot, self._next[slot]] = row
            self._next[slot] = (self._next[slot] + 1) % DEPTH
            self._remember(row)

    def _remember(self, row: Sequence[float] | Survivals) -> None:
        """Among the last rows of all."""
        self._recent_HK[self._next_recent] = row
        self._next_recent = (self._next_recent + 1) % DEPTH

    def scenarios(self, slots: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rows of blocks that these requests may see next: [S, R, K].

        As many scenarios as one request has rows; fewer for many requests, which make up for the
        noise of one another.
        """
        self._write()
        if len(slots) == 1:
            alone_SRK: npt.NDArray[np.float32] = self._rows[slots[0], :, None]
            return alone_SRK
        num_scenarios = max(1, DEPTH // len(slots))
        back_S = self._next[slots][:, None] - 1 - np.arange(num_scenarios)
        found_RSK = self._rows[np.asarray(slots)[:, None], back_S % DEPTH]
        return np.ascontiguousarray(found_RSK.transpose(1, 0, 2))

    def means(self, slots: Sequence[int]) -> Survivals:
        """Mean rows of these requests: [R, K]."""
        self._write()
        means_RK: Survivals = self._rows[slots].mean(1)
        return means_RK
