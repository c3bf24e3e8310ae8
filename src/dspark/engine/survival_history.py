"""Survivals of recent blocks by request: what a plan knows before the next block is drawn.

Half of the blocks are the latest ones, the other half are every `_SPAN`th of a longer time: a
doubtful phrase says less about the next than the answer as a whole, and who drafts nothing after
it learns nothing better.

A request that is new stands in with the first blocks of others: the latest blocks of any would be
those of requests that draft because they are sure.
Letters: H blocks remembered, B blocks to write, R requests, K positions.
"""

from collections.abc import Sequence

import numpy as np

from dspark.algorithms.foresight import Blocks
from dspark.algorithms.ranking import Survivals

_LATEST = 8
"""The latest blocks: about a phrase."""
_SPAN = 4
DEPTH = 2 * _LATEST
"""Blocks remembered of each request."""
_FIRST_BLOCKS = 4
"""Blocks of a request that tell of new ones."""
# What the first request of all is taken for: confident, so that drafting is tried.
_FIRST_CONFIDENCE = 0.8


class SurvivalHistory:
    """The last `DEPTH` rows of each slot, and the last first rows of all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        first_K = np.cumprod(np.full(block_size, _FIRST_CONFIDENCE, dtype=np.float32))
        self._first_HK = np.tile(first_K, (DEPTH, 1))
        self._rows = np.zeros((0, DEPTH, block_size), dtype=np.float32)
        self._num_blocks = np.zeros(0, dtype=np.int64)
        self._num_first = 0
        # blocks that were drawn, and slots that were taken (no rows), in their order
        self._pending: list[tuple[Sequence[int], Sequence[Sequence[float]] | Survivals | None]] = []

    def begin(self, slot: int) -> None:
        """A new request takes this slot."""
        self._pending.append(((slot,), None))

    def _begin(self, slot: int) -> None:
        if slot >= len(self._rows):
            more = slot + 1 - len(self._rows)
            empty = np.zeros((more, DEPTH, self._block_size), dtype=np.float32)
            self._rows = np.concatenate([self._rows, empty])
            self._num_blocks = np.concatenate([self._num_blocks, np.zeros(more, dtype=np.int64)])
        self._rows[slot] = self._first_HK
        self._num_blocks[slot] = 0

    def add(self, slots: Sequence[int], rows: Sequence[Sequence[float]] | Survivals) -> None:
        """The rows of a block that was drawn for these requests; written when somebody asks."""
        self._pending.append((slots, rows))

    def blocks(self, slots: Sequence[int]) -> Blocks:
        """Rows of these requests, in no order: [R, H, K], a copy."""
        self._write()
        found: Blocks = self._rows[slots]
        return found

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        while pending:
            slots, rows = pending[0]
            if rows is None:
                self._begin(slots[0])
                del pending[0]
                continue
            blocks = [rows]
            # a request's blocks of one write lie at different places
            for other, more in pending[1:_LATEST]:
                if more is None or other != slots:
                    break
                blocks.append(more)
            del pending[: len(blocks)]
            self._write_blocks(slots, np.array(blocks, dtype=np.float32))

    def _write_blocks(self, slots: Sequence[int], rows_BRK: Blocks) -> None:
        """B blocks of these requests, the oldest first."""
        index_R = np.array(slots)
        number_BR = self._num_blocks[index_R] + np.arange(len(rows_BRK))[:, None]
        self._rows[index_R, number_BR % _LATEST] = rows_BRK
        is_kept_BR = number_BR % _SPAN == 0
        place_BR = _LATEST + number_BR // _SPAN % _LATEST
        index_BR = np.broadcast_to(index_R, number_BR.shape)
        self._rows[index_BR[is_kept_BR], place_BR[is_kept_BR]] = rows_BRK[is_kept_BR]
        self._num_blocks[index_R] += len(rows_BRK)
        if int(number_BR.min()) < _FIRST_BLOCKS:
            for row in rows_BRK[number_BR < _FIRST_BLOCKS]:
                self._first_HK[self._num_first % DEPTH] = row
                self._num_first += 1
