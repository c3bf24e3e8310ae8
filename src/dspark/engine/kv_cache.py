"""Who holds which page, and how far each request's positions are written and committed.

It is bookkeeping on the host: it knows no tensor of keys or values. Target and drafter use the
same page numbers, so prefix, rollback and release can never separate them (design section 4).

Ranges of one open request (positions):

    0 .... shareable .... committed ........ written ........ capacity
    |  full pages  | final K/V | of this round, may roll back |  reserved, nothing in them yet

A full page of committed positions never changes again. It gets a name (`prefix_index`), other
requests of the same words hold it too, and it stays when its last holder goes, until the page is
needed. Only pages with one holder and without a name are written. Page 0 belongs to nobody:
padding tokens write there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dspark.engine.prefix_index import PrefixIndex
from dspark.errors import CapacityError, InputError


@dataclass(slots=True)
class _Lease:
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    written: int = 0
    num_named: int = 0
    """Leading pages whose words are known to all."""


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
        self._empty_pages = list(range(num_pages - 1, 0, -1))
        self._index = PrefixIndex()
        self._num_holders = [0] * num_pages
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._leases: dict[int, _Lease] = {}
        self._tables = np.zeros((max_requests, self.pages_for(max_positions)), dtype=np.int32)
        self.table = torch.from_numpy(self._tables)
        """Pages of all slots by position, unused entries 0; it follows every change."""

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds; some of them may keep words (`num_cached_pages`)."""
        return len(self._empty_pages) + self._index.num_idle

    @property
    def num_cached_pages(self) -> int:
        """Pages that nobody holds and that are kept for their words, until they are needed."""
        return self._index.num_idle

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

    def can_open(self, num_positions: int, names: Sequence[bytes] = (), *, spare: int = 0) -> bool:
        """Whether a new request of this many positions fits now and leaves `spare` pages free.

        What the cache knows of `names`, the names of its leading pages, costs nothing new.
        """
        if not self._free_slots:
            return False
        free = self.num_free_pages - spare
        missing = self.pages_for(num_positions)
        if missing <= free:
            return True
        known = self._index.pages(names)
        # a page that rests counts as free, and would be so no longer
        return missing - sum(not self._index.is_idle(page) for page in known) <= free

    def open(self, names: Sequence[bytes] = ()) -> int:
        """A slot for a new request; it holds the pages of the longest known prefix of `names`.

        Their positions count as committed.
        """
        if not self._free_slots:
            raise CapacityError(
                f"All {self._max_requests} request slots are taken; wait for one to finish."
            )
        slot = self._free_slots.pop()
        pages = self._index.pages(names) if names else []
        for page in pages:
            self._hold(page)
        num_positions = len(pages) * self.page_size
        self._leases[slot] = _Lease(pages, num_positions, num_positions, len(pages))
        self._tables[slot, : len(pages)] = pages
        return slot

    def capacity(self, slot: int) -> int:
        """Positions that have pages."""
        return len(self._leases[slot].pages) * self.page_size

    def can_reserve(self, slot: int, num_positions: int) -> bool:
        """Whether `reserve` would succeed now."""
        missing = self.pages_for(num_positions) - len(self._leases[slot].pages)
        return missing <= self.num_free_pages

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
            page = self._empty_pages.pop() if self._empty_pages else self._index.forget_oldest()
            self._num_holders[page] = 1
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

    def can_share(self, slot: int) -> bool:
        """Whether a page became full since the last `share`."""
        lease = self._leases[slot]
        return lease.committed // self.page_size > lease.num_named

    def share(self, slot: int, names: Sequence[bytes]) -> None:
        """Let others find the full pages of a request: `names[i]` says what its i-th page holds."""
        lease = self._leases[slot]
        num_named = min(lease.committed // self.page_size, len(names))
        for index in range(lease.num_named, num_named):
            self._index.add(lease.pages[index], names[index])
        lease.num_named = max(lease.num_named, num_named)

    def catch_up(self, slot: int, names: Sequence[bytes]) -> int:
        """Take over pages that others filled since this request started; its committed positions.

        `names` are those of its own pages; the pages kept ready for these words are given back.
        """
        lease = self._leases[slot]
        if lease.committed % self.page_size == 0:
            start = lease.committed // self.page_size
            known = self._index.pages(names[start:])
            for index, page in enumerate(known, start=start):
                self._let_go(lease.pages[index])
                self._hold(page)
                lease.pages[index] = self._tables[slot, index] = page
            lease.num_named = max(lease.num_named, start + len(known))
            lease.committed = lease.written = (start + len(known)) * self.page_size
        return lease.committed

    def close(self, slot: int) -> None:
        """The request is over: it lets go of its pages, and its slot is free again."""
        lease = self._leases.pop(slot)
        for page in reversed(lease.pages):  # the last words of a prefix are forgotten first
            self._let_go(page)
        self._tables[slot, : len(lease.pages)] = 0
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
        """The invariants: pages are empty, at rest or held as often as is counted; a page that is
        written has one holder and no name; ranges are ordered; tables agree."""
        self._index.check()
        held = Counter(page for lease in self._leases.values() for page in lease.pages)
        idle = [page for page in range(self.num_pages) if self._index.is_idle(page)]
        pages = [0, *held, *idle, *self._empty_pages]
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or held and free"
        assert self._num_holders == [held[page] for page in range(self.num_pages)]
        assert not any(self._index.is_named(page) for page in self._empty_pages)
        slots = [*self._leases, *self._free_slots]
        assert sorted(slots) == list(range(self._max_requests)), "a slot is lost or held twice"
        for slot, lease in self._leases.items():
            assert 0 <= lease.committed <= lease.written <= len(lease.pages) * self.page_size
            row = self._tables[slot]
            assert row[: len(lease.pages)].tolist() == lease.pages
            assert not row[len(lease.pages) :].any()
            for page in lease.pages[lease.committed // self.page_size :]:
                assert held[page] == 1, "a page that is written has two holders"
                assert not self._index.is_named(page), "a page that is written has a name"
        for slot in self._free_slots:
            assert not self._tables[slot].any(), "a free slot still names pages"

    def _hold(self, page: int) -> None:
        self._index.hold(page)
        self._num_holders[page] += 1

    def _let_go(self, page: int) -> None:
        self._num_holders[page] -= 1
        if self._num_holders[page] == 0 and not self._index.rest(page):
            self._empty_pages.append(page)
