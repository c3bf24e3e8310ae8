"""Taps of tokens that nobody has fed to the drafter yet, by their place in the pages.

A request that does not draft needs no context in the drafter. What its tokens leave behind is
kept here for a copy's price, and is fed when somebody drafts on it, or never. It knows places and
pages, no request; what lies at a place is the latest that was kept there.
Letters: S requests, P pages of each, L pages to be looked at, s places of a page.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.kernels.memory import zeros_in_huge_pages

_PIECE = 256
"""Tokens that are handed over together, at most: fresh memory costs more than the copy."""

Whole = npt.NDArray[np.int64]


class Late(NamedTuple):
    """Tokens to be fed now: taps, positions of their requests, places in the pages."""

    taps_NM: Tensor
    positions_N: Tensor
    places_N: Tensor
    max_visible: int
    """Positions that they know, at most."""


class Backlog:
    """Taps of at most one token for each place."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._waits = np.zeros(num_pages * page_size, dtype=bool)
        self._has_late = np.zeros(num_pages, dtype=bool)
        """Pages where something may wait: what nobody takes, rejected tokens of a request that
        has ended say, is looked at once."""
        self._taps_PM: Tensor | None = None  # most of it is never written to, and so never taken
        self._piece_NM: Tensor | None = None

    def keep(self, taps_NM: Tensor, places_N: Tensor) -> None:
        """These tokens wait; of two at a place the later one stays."""
        if self._taps_PM is None:
            self._taps_PM = zeros_in_huge_pages(
                (len(self._waits), taps_NM.shape[1]), dtype=taps_NM.dtype, device=taps_NM.device
            )
        places, last_N = np.unique(places_N.numpy()[::-1], return_index=True)
        if len(places) < len(places_N):
            picked_N = torch.from_numpy(len(places_N) - 1 - last_N)
            places_N, taps_NM = places_N[picked_N], taps_NM[picked_N]
        self._taps_PM.index_copy_(0, places_N, taps_NM)
        self._waits[places] = True
        self._has_late[places // self._page_size] = True

    def forget(self, places_N: Tensor) -> None:
        """What lies at these places waits no more: other tokens stand there now."""
        if self._taps_PM is not None:
            self._waits[places_N.numpy()] = False

    def take(self, table_RP: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Iterator[Late]:
        """What waits of the first positions of these rows of the table; it does so no more.

        `lengths`: how many positions of each row. It comes in pieces that use the same memory: one
        is gone when the next is asked for.
        """
        if self._taps_PM is None:
            return
        num_pages = -(-max(lengths) // self._page_size)
        pages_SP = table_RP.numpy()[list(rows), :num_pages]
        row_L, column_L = np.nonzero(self._has_late[pages_SP])
        if len(row_L) == 0:
            return
        pages_L = pages_SP[row_L, column_L].astype(np.int64)
        offset_s = np.arange(self._page_size)
        places_Ls = pages_L[:, None] * self._page_size + offset_s
        positions_Ls = column_L[:, None] * self._page_size + offset_s
        is_late_Ls = self._waits[places_Ls] & (positions_Ls < np.array(lengths)[row_L, None])
        places_N, first_N = np.unique(places_Ls[is_late_Ls], return_index=True)
        positions_N: Whole = positions_Ls[is_late_Ls][first_N]
        self._waits[places_N] = False
        self._has_late[pages_L] = self._waits[places_Ls].any(1)
        for start in range(0, len(places_N), _PIECE):
            yield self._piece(places_N[start : start + _PIECE], positions_N[start : start + _PIECE])

    def _piece(self, places_N: Whole, positions_N: Whole) -> Late:
        taps_PM = self._taps_PM
        assert taps_PM is not None
        if self._piece_NM is None:
            self._piece_NM = taps_PM.new_empty((_PIECE, taps_PM.shape[1]))
        places = torch.from_numpy(places_N)
        taps_NM = self._piece_NM[: len(places)]
        torch.index_select(taps_PM, 0, places, out=taps_NM)
        return Late(taps_NM, torch.from_numpy(positions_N), places, int(positions_N.max()) + 1)
