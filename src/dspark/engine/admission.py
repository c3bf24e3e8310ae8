"""Which requests take part in a step, and who gives way when pages run out.

It knows no token's meaning. Requests wait in order of arrival. One starts when the pages of its
prompt and of its next block are free and every running one could still grow by a page; what its
answer needs beyond that is taken as it grows, because clients ask for far longer answers than they
get. If nothing is free then, the youngest running request goes back to its old place in the line
and is read again later. Of all requests the oldest always moves, for the cache could hold it
alone; so each becomes the oldest in time, and nobody waits for ever.
"""

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.errors import InputError

_MOST_PASSED = 8
"""Younger requests that may start before one that waits for pages: small ones need not wait for a
huge one, and it does not wait for ever."""
_LOOKED_AT = 16
"""Waiting requests that are tried in a step, at most."""


class Admission:
    """The waiting line in front of a cache."""

    def __init__(
        self, *, cache: KVCache, max_positions: int, block_size: int, reserves_all: bool
    ) -> None:
        """`reserves_all`: pages for the whole length are taken at the start, nobody gives way."""
        self._cache = cache
        self._max_positions = max_positions
        self._block_size = block_size
        self._reserves_all = reserves_all
        self._waiting: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(live.request.id == request_id for live in self._waiting)

    def submit(self, live: LiveRequest) -> None:
        """Queue a request. Raises `InputError` for one that could never be admitted."""
        needed = self._whole(live)
        if not self._cache.can_ever_hold(needed):
            raise InputError(
                f"Request {live.request.id!r} needs {needed} positions, but the cache holds "
                f"{(self._cache.num_pages - 1) * self._cache.page_size}; lower max_tokens or load "
                "with a larger cache."
            )
        self._waiting.append(live)

    def withdraw(self, request_id: str) -> bool:
        """Take a waiting request out of the line; whether it was there."""
        for live in self._waiting:
            if live.request.id == request_id:
                self._waiting.remove(live)
                return True
        return False

    def admit(self, running: Sequence[LiveRequest]) -> list[LiveRequest]:
        """The requests that start now; they have a slot and the pages for their next block."""
        admitted: list[LiveRequest] = []
        while self._waiting and self._cache.has_free_slot:
            live = self._next(sum(map(self._may_grow, [*running, *admitted])))
            if live is None:
                break
            self._waiting.remove(live)
            slot = self._cache.open(live.page_names)
            self._cache.reserve(slot, self._at_start(live))
            live.start(slot, num_known=self._cache.committed(slot))
            admitted.append(live)
        return admitted

    def grow(self, running: Sequence[LiveRequest]) -> list[LiveRequest]:
        """Pages for the next block of all that decode, older ones first.

        Returns those that had to give theirs up; they wait again.
        """
        reach = 1 + self._block_size
        short = [r for r in running if self._cache.capacity(r.slot) < r.num_computed + reach]
        if not short:
            return []
        by_age = sorted(running, key=attrgetter("arrival"))
        sent_back: list[LiveRequest] = []
        for live in sorted(short, key=attrgetter("arrival")):
            needed = live.num_computed + reach
            while live not in sent_back and not self._cache.can_reserve(live.slot, needed):
                sent_back.append(by_age.pop())
                self._send_back(sent_back[-1])
            if live not in sent_back:
                self._cache.reserve(live.slot, needed)
        return sent_back

    def _send_back(self, live: LiveRequest) -> None:
        self._cache.close(live.slot)
        live.send_back()
        insort(self._waiting, live, key=attrgetter("arrival"))

    def _may_grow(self, live: LiveRequest) -> bool:
        return self._cache.capacity(live.slot) < self._whole(live)

    def _next(self, spare: int) -> LiveRequest | None:
        """The oldest request, or one behind it that fits while it does not; `spare` pages stay."""
        oldest = self._waiting[0]
        if self._fits(oldest, spare):
            return oldest
        if oldest.was_sent_back or oldest.num_passed >= _MOST_PASSED:
            return None
        for live in self._waiting[1:_LOOKED_AT]:
            if self._fits(live, spare):
                oldest.num_passed += 1
                return live
        return None

    def _fits(self, live: LiveRequest, spare: int) -> bool:
        return self._cache.can_open(self._at_start(live), live.page_names, spare=spare)

    def _at_start(self, live: LiveRequest) -> int:
        whole = self._whole(live)
        if self._reserves_all:
            return whole
        return min(len(live.tokens) + 1 + self._block_size, whole)

    def _whole(self, live: LiveRequest) -> int:
        # a block of the drafter may stand past the last token that will be committed
        length = live.num_prompt + live.params.max_tokens
        return min(length, self._max_positions) + self._block_size
