"""Who owns which page, and how far each request's positions are written and committed.

It is bookkeeping on the host: it knows no tensor of keys or values. Target and drafter use the
same page numbers, so prefix, rollback and release can never separate them (design section 4).

Ranges of one open request (positions):

    0 ........ committed ........ written ........ capacity
    |  final K/V  | of this round, may roll back |  reserved pages, nothing in them yet

Page 0 belongs to nobody: padding tokens write there.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dspark.errors import CapacityError, InputError


@dataclass(slots=True)
class _Lease:
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    written: int = 0


class KVCache:
    """Pages for at most `max_requests` requests of at most `max_positions` positions each."""

    def __init__(
        self, *, num_pages: int, page_size: int, max_requests: int, max_positions: int
    ) -> None:
        if num_pages < 2 or page_size < 1 or max_requests < 1 or max_positions < 1:
            raise InputError(
                f"A cache of {num_pages} pages of {page_size} positions for {max_requests} "
                f"requests of {max_positions} positions is too small; every count must be "
                "positive, and at least 2 pages are needed."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_positions = max_positions
        self._max_requests = max_requests
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._leases: dict[int, _Lease] = {}
        self._tables = np.zeros((max_requests, self.pages_for(max_positions)), dtype=np.int32)
        self.table = torch.from_numpy(self._tables)
        """Pages of all slots by position, unused entries 0; it follows every change."""

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_pages)

    @property
    def has_free_slot(self) -> bool:
        """Whether one more request can be opened."""
        return bool(self._free_slots)

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_positions // self.page_size)

    def can_ever_hold(self, num_positions: int) -> bool:
        """Whether an empty cache could hold a request of this many positions."""
        return (
            num_positions <= self.max_positions
            and self.pages_for(num_positions) <= self.num_pages - 1
        )

    def can_open(self, num_positions: int) -> bool:
        """Whether a new request of this many positions fits now."""
        return self.has_free_slot and self.pages_for(num_positions) <= self.num_free_pages

    def open(self) -> int:
        """A slot for a new request, without pages yet."""
        if not self._free_slots:
            raise CapacityError(
                f"All {self._max_requests} request slots are taken; wait for one to finish."
            )
        slot = self._free_slots.pop()
        self._leases[slot] = _Lease()
        return slot

    def reserve(self, slot: int, num_positions: int) -> None:
        """Make sure that positions below `num_positions` have pages; the old ones keep theirs."""
        lease = self._leases[slot]
        if num_positions > self.max_positions:
            raise CapacityError(
                f"{num_positions} positions were asked for one request, but the cache holds at "
                f"most {self.max_positions}; shorten the prompt or max_tokens."
            )
        missing = self.pages_for(num_positions) - len(lease.pages)
        if missing > self.num_free_pages:
            raise CapacityError(
                f"{missing} more pages are needed and {self.num_free_pages} are free; "
                "use a larger cache or fewer requests at a time."
            )
        for _ in range(missing):
            page = self._free_pages.pop()
            self._tables[slot, len(lease.pages)] = page
            lease.pages.append(page)

    def write(self, slot: int, num_positions: int) -> None:
        """State that positions below `num_positions` hold K/V, the last of them not yet final."""
        lease = self._leases[slot]
        assert lease.committed <= num_positions <= len(lease.pages) * self.page_size
        lease.written = num_positions

    def commit(self, slot: int, num_positions: int) -> None:
        """Positions below `num_positions` are final; what was written beyond is rolled back."""
        lease = self._leases[slot]
        assert lease.committed <= num_positions <= lease.written
        lease.committed = lease.written = num_positions

    def committed(self, slot: int) -> int:
        """Positions of a request whose K/V are final."""
        return self._leases[slot].committed

    def roll_back(self, slot: int, num_positions: int) -> None:
        """Forget everything from `num_positions` on and give back the pages behind it."""
        lease = self._leases[slot]
        lease.committed = min(lease.committed, num_positions)
        lease.written = lease.committed
        keep = self.pages_for(num_positions)
        self._release(slot, lease, keep)

    def close(self, slot: int) -> None:
        """The request is over: its pages and its slot are free again."""
        lease = self._leases.pop(slot)
        self._release(slot, lease, 0)
        self._free_slots.append(slot)

    def tables(self, slots: npt.NDArray[np.int64], *, num_positions: int) -> npt.NDArray[np.int32]:
        """Block tables [R, P] of these slots, wide enough for `num_positions`; unused entries 0."""
        return self._tables[slots, : max(1, self.pages_for(num_positions))]

    def places(
        self, slots_N: npt.NDArray[np.int64], positions_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """page * page_size + row of each (slot, position)."""
        pages = self._tables[slots_N, positions_N // self.page_size].astype(np.int64)
        places: npt.NDArray[np.int64] = pages * self.page_size + positions_N % self.page_size
        return places

    def check(self) -> None:
        """The invariants: every page is free or held once; ranges are ordered; tables agree."""
        held = [page for lease in self._leases.values() for page in lease.pages]
        pages = [0, *held, *self._free_pages]
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or held twice"
        slots = [*self._leases, *self._free_slots]
        assert sorted(slots) == list(range(self._max_requests)), "a slot is lost or held twice"
        for slot, lease in self._leases.items():
            assert 0 <= lease.committed <= lease.written <= len(lease.pages) * self.page_size
            row = self._tables[slot]
            assert row[: len(lease.pages)].tolist() == lease.pages
            assert not row[len(lease.pages) :].any()
        for slot in self._free_slots:
            assert not self._tables[slot].any(), "a free slot still names pages"

    def _release(self, slot: int, lease: _Lease, keep: int) -> None:
        while len(lease.pages) > keep:
            self._free_pages.append(lease.pages.pop())
            self._tables[slot, len(lease.pages)] = 0
