"""One address in front of servers that die: what clients see. Real servers, planted deaths."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dspark.cluster.exchange import Call, Head, exchange
from dspark.cluster.gateway import Gateway, ReplicaLost
from dspark.llm import LLM
from dspark.serving.app import App, AppConfig

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 12}


class LocalReplicas:
    """Apps in this process; `deaths[i]`: items after which the i-th response loses its replica."""

    def __init__(self, app: App, deaths: Sequence[int | None] = ()) -> None:
        self.app = app
        self.deaths = list(deaths)
        self.calls: list[Call] = []

    async def respond(self, call: Call) -> AsyncIterator[Head | bytes]:
        self.calls.append(call)
        left = self.deaths.pop(0) if self.deaths else None
        async for item in exchange(self.app, call):
            if left == 0:
                raise ReplicaLost("killed")
            left = None if left is None else left - 1
            yield item

    async def num_running(self) -> int:
        return 2

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        return [("a", self.app.service.metrics.text()), ("b", self.app.service.metrics.text())]


def run(
    llm: LLM,
    ask: Callable[[httpx.AsyncClient, Gateway, LocalReplicas], Any],
    deaths: Sequence[int | None] = (),
) -> Any:
    """`ask` in an event loop with a gateway before a toy server."""

    async def main() -> Any:
        app = App(llm, AppConfig(served_name="toy"))
        await app.service.start()
        replicas = LocalReplicas(app, deaths)
        gateway = Gateway(replicas)
        transport = httpx.ASGITransport(gateway)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await ask(client, gateway, replicas)
        finally:
            await app.service.stop()

    return asyncio.run(main())


async def answer(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={**CHAT, "temperature": 0, **changes})


def scope_of(method: str, path: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": list(headers),
    }


def test_an_answer_passes_as_it_is(llm: LLM) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        whole = (await answer(client)).json()
        assert whole["usage"]["completion_tokens"] == 12
        events = (await answer(client, stream=True)).text.split("\n\n")
        texts = [json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events[:-2]]
        assert "".join(texts) == whole["choices"][0]["message"]["content"]
        assert events[-2] == "data: [DONE]"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "toy"
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400

    run(llm, ask)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_without_a_token_goes_to_another_replica(llm: LLM, is_streamed: bool) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        found = await answer(client, stream=is_streamed)
        assert found.status_code == 200
        assert gateway.num_retried == 2
        assert gateway.num_broken == 0
        assert len(replicas.calls) == 3
        again = await answer(client, stream=is_streamed)
        strip = ("id", "created")
        if not is_streamed:
            kept = [{k: v for k, v in r.json().items() if k not in strip} for r in (found, again)]
            assert kept[0] == kept[1]
        assert found.text.count("[DONE]") == is_streamed

    run(llm, ask, deaths=[0, 0, None])


def test_an_answer_that_has_begun_ends_with_an_error_and_no_second_beginning(
    llm: LLM,
) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        found = await answer(client, stream=True, max_tokens=40)
        events = [json.loads(e[6:]) for e in found.text.split("\n\n") if e]
        assert "error" in events[-1]
        assert sum("role" in e["choices"][0]["delta"] for e in events[:-1]) == 1
        assert "[DONE]" not in found.text
        assert (gateway.num_retried, gateway.num_broken) == (0, 1)

    run(llm, ask, deaths=[3])


def test_too_many_deaths_are_an_error_with_a_remedy(llm: LLM) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        found = await answer(client)
        assert found.status_code == 503
        assert found.json()["error"]["code"] == "replica_lost"
        assert "Retry-After" in found.headers

    run(llm, ask, deaths=[0, 0, 0])


def test_one_page_has_the_metrics_of_all(llm: LLM) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        await answer(client)
        text = (await client.get("/metrics")).text
        for replica in "ab":
            assert f'dspark_generated_tokens_total{{replica="{replica}"}} 24.0' in text
        assert text.count("# TYPE dspark_generated_tokens_total") == 1
        assert "dspark_gateway_retried_requests_total 1" in text
        assert (await client.get("/health")).json() == {"status": "ok", "replicas": 2}

    run(llm, ask, deaths=[0])


def test_a_client_that_leaves_ends_the_work(llm: LLM) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        body = json.dumps({**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
        sent: list[Any] = []
        has_begun = asyncio.Event()
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if requests:
                return requests.pop()
            await has_begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            has_begun.set()

        scope = scope_of("POST", "/v1/chat/completions", [(b"content-type", b"application/json")])
        await gateway(scope, receive, send)
        assert len(sent) < 200
        bridge = replicas.app.service.bridge
        while bridge.num_open:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(gateway.drain(), 5)

    run(llm, ask)


def test_nothing_new_is_taken_while_it_drains(llm: LLM) -> None:
    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        await gateway.drain()
        assert (await answer(client)).status_code == 503
        assert not replicas.calls

    run(llm, ask)


def test_who_watches_holds_up_no_end(llm: LLM) -> None:
    """A feed has no end of its own; the answers that run are waited for, the feed is not."""

    async def ask(client: httpx.AsyncClient, gateway: Gateway, replicas: LocalReplicas) -> None:
        sent: list[Any] = []
        is_watching = asyncio.Event()
        requests = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)
            is_watching.set()

        scope = scope_of("GET", "/live/events")
        watching = asyncio.create_task(gateway(scope, receive, send))
        await is_watching.wait()
        await asyncio.wait_for(gateway.drain(), 5)
        await asyncio.wait_for(watching, 5)
        assert sent[0]["status"] == 200
        assert not sent[-1].get("more_body")

    run(llm, ask)


def test_the_live_page_and_its_chats_are_told_from_others() -> None:
    assert Call(method="GET", path="/live/events").is_feed
    assert Call(method="POST", path="/live/crowd").is_watched
    chat = Call(method="POST", path="/v1/chat/completions", headers=[(b"accept", b"*/*")])
    assert not chat.is_watched
    assert replace(chat, headers=[(b"x-dspark-watched", b"1")]).is_watched


def test_equal_beginnings_are_told_from_the_body() -> None:
    chat = Call(method="POST", path="/", body=b'{"stream": true, "messages": [{"content": "a"}]}')
    same = Call(method="POST", path="/", body=b'{"messages": [{"content": "a"}], "n": 1}')
    assert chat.beginning == same.beginning
    for body in (b"", b"{", b"[1]", b'{"model": "x"}'):
        assert Call(method="POST", path="/", body=body).beginning == ""
    assert Call(method="POST", path="/", body=b'{"prompt": [1, 2]}').beginning == "[1, 2]"
