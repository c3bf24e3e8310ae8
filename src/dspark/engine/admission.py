"""Which requests take part in a step: first come, first served, when their pages are free.

It knows no token's meaning. A request is admitted only when pages for its whole length are free,
so that no admitted request ever waits for memory.
"""

from collections import deque

from dspark.core import Request
from dspark.engine.kv_cache import KVCache
from dspark.errors import InputError


class Admission:
    """The waiting line in front of a cache."""

    def __init__(self, *, cache: KVCache, max_positions: int, block_size: int) -> None:
        self._cache = cache
        self._max_positions = max_positions
        self._block_size = block_size
        self._waiting: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return any(request.id == request_id for request in self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `InputError` for one that could never be admitted."""
        needed = self._positions(request)
        if not self._cache.can_ever_hold(needed):
            raise InputError(
                f"Request {request.id!r} needs {needed} positions, but the cache holds "
                f"{(self._cache.num_pages - 1) * self._cache.page_size}; lower max_tokens or load "
                "with a larger cache."
            )
        self._waiting.append(request)

    def withdraw(self, request_id: str) -> bool:
        """Take a waiting request out of the line; whether it was there."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def admit(self) -> list[tuple[Request, int]]:
        """The requests that start now, each with its slot; their pages are reserved."""
        admitted = []
        while self._waiting and self._cache.can_open(self._positions(self._waiting[0])):
            request = self._waiting.popleft()
            slot = self._cache.open()
            self._cache.reserve(slot, self._positions(request))
            admitted.append((request, slot))
        return admitted

    def _positions(self, request: Request) -> int:
        # a block of the drafter may stand past the last token that will be committed
        length = len(request.prompt_ids) + request.params.max_tokens
        return min(length, self._max_positions) + self._block_size
