"""What one client has yet to read of its order: a bounded buffer on the event loop.

The engine's thread never waits for it: a buffer that is full ends its order.
"""

import asyncio
from collections.abc import Callable, Sequence

from dspark.serving.work import Cause, Failure, Order, Piece

Pour = Callable[[Sequence[Piece | Failure]], bool]
"""Sends pieces on at once; false if they have to wait for the client."""


class ClientGone(Exception):
    """Nobody reads this order any more."""


class Stream:
    """Pieces of an order until it is over; used on the event loop alone."""

    def __init__(self, order: Order, *, limit: int, is_whole: bool) -> None:
        """`limit`: pieces that may lie here unread. `is_whole`: the reader wants the whole order at
        once; it is woken when all is there, and the limit does not count."""
        self.order = order
        self.on_overflow: Callable[[], None] | None = None
        """Called when the buffer is full and its reader sleeps elsewhere."""
        self._limit = limit
        self._is_whole = is_whole
        self._items: list[Piece | Failure] = []
        self._num_left = len(order.requests)
        self._is_gone = False
        self._waiter: asyncio.Future[None] | None = None
        self._pour: Pour | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be put in."""
        return self._num_left == 0 or self._is_gone

    def put(self, item: Piece | Failure) -> bool:
        """Add what came; false if the buffer was full, and the order is to be cancelled."""
        if self.is_over:
            return True
        is_full = not self._is_whole and len(self._items) >= self._limit
        if is_full:
            item = Failure(Cause.SLOW_READER, "The answer was not read as fast as it was made.")
            self._items.clear()
        self._items.append(item)
        if isinstance(item, Failure):
            self._num_left = 0
        elif item.finish_reason is not None:
            self._num_left -= 1
        if self._num_left == 0 or not (self._is_whole or self._pour):
            self._wake()
        if is_full and self.on_overflow is not None:
            self.on_overflow()
        return not is_full

    def pass_on(self) -> None:
        """Behind the last `put` of a step: what came goes the short way, if the reader named one.
        The end does not: it wakes the reader, who has more to say."""
        if self._pour is None or not self._items or self.is_over:
            return
        if self._pour(self._items):
            self._items = []
        else:
            self._wake()

    def leave(self) -> None:
        """The client is gone: whoever waits in `get` learns of it."""
        self._is_gone = True
        self._wake()

    async def get(self, pour: Pour | None = None) -> list[Piece | Failure]:
        """All that came since the last call, at least one item. Raises `ClientGone`.

        With `pour` the reader sleeps on while that sends what comes.
        """
        while not self._items or (self._is_whole and self._num_left and not self._is_gone):
            if self._is_gone:
                raise ClientGone
            self._waiter = asyncio.get_running_loop().create_future()
            self._pour = pour
            try:
                await self._waiter
            finally:
                self._waiter = self._pour = None
        if self._is_gone:
            raise ClientGone
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        self._pour = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
