"""A client's buffer: joined reads, its bound, departures."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from dspark.core import FinishReason, Request, SamplingParams
from dspark.serving.stream import ClientGone, Stream
from dspark.serving.work import Cause, Counts, Failure, Order, Piece


def order(n: int = 1) -> Order:
    requests = [Request(id=f"{i}", prompt_ids=[1], params=SamplingParams()) for i in range(n)]
    return Order(id="o", requests=requests, arrived_s=0.0)


def piece(text: str, *, answer: int = 0, is_last: bool = False) -> Piece:
    reason = FinishReason.STOP if is_last else None
    return Piece(answer, text, (1,), None, reason, Counts())


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(test())


def test_a_read_takes_all_that_came() -> None:
    async def test() -> None:
        stream = Stream(order(), limit=8, is_whole=False)
        for text in "abc":
            assert stream.put(piece(text))
        assert [item.text for item in await stream.get()] == ["a", "b", "c"]
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.put(piece("d", is_last=True))
        assert [item.text for item in await waiting] == ["d"]
        assert stream.is_over
        assert stream.put(piece("e"))  # after the end: dropped
        assert not stream._items

    run(test)


def test_a_reader_of_the_whole_sleeps_until_all_answers_ended() -> None:
    async def test() -> None:
        stream = Stream(order(2), limit=1, is_whole=True)
        waiting = asyncio.create_task(stream.get())
        for text in "abc":
            assert stream.put(piece(text))  # the bound is for streams
            await asyncio.sleep(0)
        stream.put(piece("d", is_last=True))
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(piece("e", answer=1, is_last=True))
        assert [item.text for item in await waiting] == ["a", "b", "c", "d", "e"]

    run(test)


def test_a_full_buffer_ends_its_order() -> None:
    async def test() -> None:
        stream = Stream(order(), limit=2, is_whole=False)
        calls: list[int] = []
        stream.on_overflow = lambda: calls.append(1)
        assert stream.put(piece("a"))
        assert stream.put(piece("b"))
        assert not stream.put(piece("c"))
        assert calls == [1]
        (failure,) = await stream.get()
        assert isinstance(failure, Failure)
        assert failure.cause is Cause.SLOW_READER
        assert stream.is_over

    run(test)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_departure_wakes_the_reader(is_whole: bool) -> None:
    async def test() -> None:
        stream = Stream(order(), limit=2, is_whole=is_whole)
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        stream.leave()
        with pytest.raises(ClientGone):
            await waiting
        with pytest.raises(ClientGone):
            await stream.get()

    run(test)
