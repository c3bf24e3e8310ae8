"""A client's buffer: joined reads, its bound, departures."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

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


def test_pieces_go_the_short_way_and_the_end_wakes_the_reader() -> None:
    async def test() -> None:
        stream = Stream(order(), limit=2, is_whole=False)
        poured: list[str] = []

        def pour(items: Sequence[Piece | Failure]) -> bool:
            poured.append("".join(item.text for item in items if isinstance(item, Piece)))
            return True

        reading = asyncio.create_task(stream.get(pour))
        await asyncio.sleep(0)
        for texts in ("ab", "c", "d"):  # more than the limit, but nothing lies unread
            for text in texts:
                assert stream.put(piece(text))
            stream.pass_on()
            await asyncio.sleep(0)
        assert poured == ["ab", "c", "d"]
        assert not reading.done()
        stream.put(piece("e", is_last=True))
        stream.pass_on()
        assert [item.text for item in await reading] == ["e"]
        assert len(poured) == 3

    run(test)


def test_what_a_connection_does_not_take_waits_for_the_reader_in_its_order() -> None:
    async def test() -> None:
        stream = Stream(order(), limit=3, is_whole=False)
        reading = asyncio.create_task(stream.get(lambda _: False))
        await asyncio.sleep(0)
        stream.put(piece("a"))
        stream.pass_on()
        for text in "bc":  # the reader is awake and has not read yet
            assert stream.put(piece(text))
            stream.pass_on()
        assert not stream.put(piece("d"))
        (failure,) = await reading
        assert isinstance(failure, Failure)

    run(test)


def test_a_reader_that_is_not_there_gets_all_later() -> None:
    async def test() -> None:
        stream = Stream(order(), limit=8, is_whole=False)
        stream.put(piece("a"))
        stream.pass_on()
        stream.put(piece("b"))
        stream.pass_on()
        assert [item.text for item in await stream.get(lambda _: True)] == ["a", "b"]

    run(test)
