"""Taps of tokens that nobody has fed to the drafter yet, by their place in the pages.

A request that does not draft needs no context in the drafter. What its tokens leave behind waits
here, and is fed when somebody drafts on it, or never. The taps of the latest steps are held as the
pass left them, which costs a step nothing; only what still waits when they have become many is
copied, to its place in memory of the pages' size. It knows places and pages, no request; what lies
at a place is the latest that was kept there.
Letters: S requests, P pages of each, L pages to be looked at, s places of a page.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.kernels.memory import zeros_in_huge_pages

_PIECE = 256
"""Tokens that are handed over together, at most: fresh memory costs more than the copy. As many
are copied together to their places."""
_MOST_HELD = 4096
"""Tokens whose taps are held as they came, at most, and `_PIECE` more: answers of some requests,
which end before anything is copied."""
_MOST_NEWS = 128
"""Times that something was kept or forgotten before it is noted by place, at most."""

_NOTHING, _COPIED = -1, -2
"""At a place, instead of the number of the token that waits there: none does, or its taps lie at
the place."""

Whole = npt.NDArray[np.int64]


class Late(NamedTuple):
    """Tokens to be fed now: taps, positions of their requests, places in the pages."""

    taps_NM: Tensor
    positions_N: Tensor
    places_N: Tensor
    max_visible: int
    """Positions that they know, at most."""


class _Step(NamedTuple):
    """Tokens that were kept together; they are numbered through from `first` on."""

    first: int
    taps_NM: Tensor
    places_N: Tensor


class Backlog:
    """Taps of at most one token for each place."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._numbers = np.full(num_pages * page_size, _NOTHING, dtype=np.int64)
        self._has_late = np.zeros(num_pages, dtype=bool)
        """Pages where something may wait: what nobody takes, rejected tokens of a request that
        has ended say, is looked at once."""
        self._steps: deque[_Step] = deque()
        self._num_held = 0
        self._next_number = 0
        # what is not yet in `_numbers`: places, and the first number or none where they are free
        self._news: list[tuple[Tensor, int | None]] = []
        self._taps_PM: Tensor | None = None  # most of it is never written to, and so never taken
        self._piece_NM: Tensor | None = None

    def keep(self, taps_NM: Tensor, places_N: Tensor) -> None:
        """These tokens wait; of two at a place the later one stays. Both tensors are held on to:
        nobody may write to them any more."""
        first, count = self._next_number, len(places_N)
        self._steps.append(_Step(first, taps_NM, places_N))
        self._next_number += count
        self._num_held += count
        self._note(places_N, first)
        if self._num_held > _MOST_HELD + _PIECE:
            self._copy_oldest()

    def forget(self, places_N: Tensor) -> None:
        """What lies at these places waits no more: other tokens stand there now.

        Where nothing waits there is nothing to note: who drafts all the time pays for none of this.
        """
        if not self._next_number:
            return
        if self._news or self._has_late[places_N.numpy() // self._page_size].any():
            self._note(places_N, None)

    def take(self, table_RP: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Iterator[Late]:
        """What waits of the first positions of these rows of the table; it does so no more.

        `lengths`: how many positions of each row. It comes in pieces that use the same memory: one
        is gone when the next is asked for.
        """
        if not self._next_number:
            return
        self._take_in_news()
        num_pages = -(-max(lengths) // self._page_size)
        pages_SP = table_RP.numpy()[list(rows), :num_pages]
        row_L, column_L = np.nonzero(self._has_late[pages_SP])
        if len(row_L) == 0:
            return
        pages_L = pages_SP[row_L, column_L].astype(np.int64)
        offset_s = np.arange(self._page_size)
        places_Ls = pages_L[:, None] * self._page_size + offset_s
        positions_Ls = column_L[:, None] * self._page_size + offset_s
        waits_Ls = self._numbers[places_Ls] != _NOTHING
        is_late_Ls = waits_Ls & (positions_Ls < np.array(lengths)[row_L, None])
        places_N, first_N = np.unique(places_Ls[is_late_Ls], return_index=True)
        positions_N: Whole = positions_Ls[is_late_Ls][first_N]
        order_N = np.argsort(self._numbers[places_N], kind="stable")
        places_N, positions_N = places_N[order_N], positions_N[order_N]
        numbers_N = self._numbers[places_N]
        self._numbers[places_N] = _NOTHING
        self._has_late[pages_L] = (self._numbers[places_Ls] != _NOTHING).any(1)
        steps = list(self._steps)
        for start in range(0, len(places_N), _PIECE):
            part = slice(start, start + _PIECE)
            yield self._piece(steps, numbers_N[part], positions_N[part], places_N[part])

    def _note(self, places_N: Tensor, first: int | None) -> None:
        self._news.append((places_N, first))
        if len(self._news) >= _MOST_NEWS:
            self._take_in_news()

    def _take_in_news(self) -> None:
        """Numbers by place become those of the latest tokens there."""
        news, self._news = self._news, []
        if not news:
            return
        places_N: Whole = np.concatenate([places.numpy() for places, _ in news])
        numbers_N = np.concatenate(
            [
                np.full(len(places), _NOTHING) if first is None else first + np.arange(len(places))
                for places, first in news
            ]
        )
        places_N, last_N = np.unique(places_N[::-1], return_index=True)
        numbers_N = numbers_N[::-1][last_N]
        self._numbers[places_N] = numbers_N
        self._has_late[places_N[numbers_N != _NOTHING] // self._page_size] = True

    def _copy_oldest(self) -> None:
        """Lets go of the oldest steps; what of them still waits is copied to its place."""
        self._take_in_news()
        oldest = list[_Step]()
        while self._num_held > _MOST_HELD:
            oldest.append(self._steps.popleft())
            self._num_held -= len(oldest[-1].places_N)
        start = oldest[0].first
        places_N: Whole = np.concatenate([step.places_N.numpy() for step in oldest])
        waits_N = self._numbers[places_N] == start + np.arange(len(places_N))
        if not waits_N.any():
            return
        self._numbers[places_N[waits_N]] = _COPIED
        if self._taps_PM is None:
            taps_NM = oldest[0].taps_NM
            self._taps_PM = zeros_in_huge_pages(
                (len(self._numbers), taps_NM.shape[1]), dtype=taps_NM.dtype, device=taps_NM.device
            )
        for first, taps_NM, places in oldest:
            row_N = torch.from_numpy(np.flatnonzero(waits_N[first - start :][: len(places)]))
            if len(row_N):
                self._taps_PM.index_copy_(0, places[row_N], taps_NM[row_N])

    def _piece(
        self, steps: Sequence[_Step], numbers_N: Whole, positions_N: Whole, places_N: Whole
    ) -> Late:
        """`numbers_N` rise: first those whose taps lie at their places."""
        places, count = torch.from_numpy(places_N), len(places_N)
        num_copied = int(np.searchsorted(numbers_N, _COPIED, side="right"))
        parts = []
        if num_copied:
            assert self._taps_PM is not None
            parts.append(self._taps_PM.index_select(0, places[:num_copied]))
        if num_copied < count:
            held_N = numbers_N[num_copied:]
            firsts = np.array([step.first for step in steps])
            step_N = np.searchsorted(firsts, held_N, side="right") - 1
            row_N = torch.from_numpy(held_N - firsts[step_N])
            ends = [*(np.flatnonzero(np.diff(step_N)) + 1).tolist(), len(held_N)]
            for start, end in zip([0, *ends], ends, strict=False):
                taps_NM = steps[step_N[start]].taps_NM
                parts.append(taps_NM.index_select(0, row_N[start:end]))
        if self._piece_NM is None:
            self._piece_NM = parts[0].new_empty((_PIECE, parts[0].shape[1]))
        taps_NM = torch.cat(parts, out=self._piece_NM[:count])
        return Late(taps_NM, torch.from_numpy(positions_N), places, int(positions_N.max()) + 1)
