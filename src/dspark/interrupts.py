"""Ctrl-C as a question that a long run asks itself between two pieces of work."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def polite_stop(on_first: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or a termination signal has come since the block began.

    The first one calls `on_first` and does nothing else; the next one acts as it does outside of
    the block. Where a signal cannot be caught (outside of the main thread) the answer is no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    is_asked = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        restore()
        on_first()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield lambda: is_asked
    finally:
        restore()
