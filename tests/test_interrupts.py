"""Ctrl-C as a question."""

import signal
import threading
from collections.abc import Callable

import pytest

from dspark.interrupts import polite_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_question_and_the_second_acts(number: int):
    before = signal.getsignal(number)
    seen: list[int] = []
    signal.signal(number, lambda number, _: seen.append(number))
    try:
        calls: list[str] = []
        with polite_stop(lambda: calls.append("once")) as should_stop:
            assert not should_stop()
            signal.raise_signal(number)
            assert should_stop()
            assert calls == ["once"]
            assert seen == []
            signal.raise_signal(number)
            assert seen == [number]
            assert calls == ["once"]
        signal.raise_signal(number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


def test_another_thread_is_never_asked():
    answers: list[Callable[[], bool]] = []

    def work() -> None:
        with polite_stop(lambda: None) as should_stop:
            answers.append(should_stop)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not answers[0]()
