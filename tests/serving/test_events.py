"""The live feed: its fields, its listeners, its bounds."""

import asyncio
import json
import threading
from typing import Any

import httpx

from dspark.llm import LLM
from dspark.serving.app import App
from dspark.serving.events import Feed, Listener

BODY = {"prompt": "Hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def watch(url: str, until: int) -> list[dict[str, Any]]:
    """The first events of the feed while an answer is made."""
    found: list[dict[str, Any]] = []
    with httpx.stream("GET", f"{url}/live/events", timeout=30.0) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if line and len(found) == 1:
                ask = threading.Thread(
                    target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": BODY}
                )
                ask.start()
            if len(found) == until:
                break
    ask.join()
    return found


def test_every_step_is_told_block_by_block(live: tuple[App, str], loaded: LLM) -> None:
    hello, first, *steps = watch(live[1], 4)
    assert hello["type"] == "hello"
    assert hello["block_size"] == loaded.block_size == 4
    assert first["rounds"][0]["prefill"]
    assert first["prompt_tokens"] + first["rounds"][0]["cached"] >= 1
    assert first["running"] == 1
    for step in steps:
        (item,) = step["rounds"]
        assert 0 <= item["accepted"] <= item["planned"] <= item["offered"] == 4
        assert len(item["drafted"]) == len(item["survival"]) == item["offered"]
        assert item["survival"] == sorted(item["survival"], reverse=True)
        assert item["drafted"][: item["accepted"]] == item["tokens"][: item["accepted"]]
        assert item["origins"].count("accepted") == item["accepted"]
        assert len(item["origins"]) == len(item["tokens"])
        assert step["budget"] == item["planned"]
        assert step["verify_tokens"] == 1 + item["planned"]
        assert step["seconds"] > 0
        assert step["dropped"] == 0
    assert [step["n"] for step in steps] == [first["n"] + 1, first["n"] + 2]


def test_a_slow_listener_loses_steps_and_is_told() -> None:
    async def test() -> None:
        listener = Listener()
        for i in range(70):
            listener.put(f'"n":{i}')
        listener.close()
        data = b"".join([part async for part in listener.read()]).decode()
        events = [json.loads(line.removeprefix("data: ")) for line in data.split("\n\n") if line]
        assert [event["n"] for event in events] == list(range(64))
        assert events[0]["dropped"] == 6
        assert all(event["dropped"] == 0 for event in events[1:])

    asyncio.run(test())


def test_listeners_are_bounded_and_an_empty_feed_is_unwatched(loaded: LLM) -> None:
    async def test() -> None:
        feed = Feed(loaded)
        assert not feed.is_watched
        listeners = [feed.join() for _ in range(32)]
        assert feed.join() is None
        assert feed.is_watched
        for listener in listeners:
            assert listener is not None
            feed.leave(listener)
        assert not feed.is_watched
        feed.close()
        assert feed.join() is None

    asyncio.run(test())
