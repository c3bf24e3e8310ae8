"""One address for several replicas: passes requests on, and outlives a replica that dies.

An answer of which nothing was sent yet goes to another replica; of an answer that has begun the
client gets an error event, never a second beginning. It knows no Ray and no model.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from dspark.cluster.exchange import Call, Head
from dspark.cluster.merged_metrics import merged
from dspark.serving.gate import refuse
from dspark.serving.metrics import CONTENT_TYPE
from dspark.serving.refusals import Refusal

log = logging.getLogger("dspark.gateway")

_KNOWN = frozenset(
    {
        "/",
        "/health",
        "/live/crowd",
        "/live/events",
        "/metrics",
        "/ready",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
    }
)


class ReplicaLost(Exception):
    """The replica that was answering is gone."""


class Replicas(Protocol):
    """The servers behind the gateway."""

    def respond(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The response of one of them; an async generator that raises `ReplicaLost`."""

    async def num_running(self) -> int:
        """How many can answer."""

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """Name and Prometheus text of each."""


class Gateway:
    """The ASGI application in front of `Replicas`."""

    def __init__(self, replicas: Replicas, *, max_tries: int = 3, drain_s: float = 30.0) -> None:
        """`max_tries`: replicas that one request may meet before it is given up. `drain_s`:
        seconds that running answers get when the server is told to stop."""
        self._replicas = replicas
        self._max_tries = max_tries
        self._drain_s = drain_s
        self._num_open = 0
        self._responses: dict[tuple[str, int], int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._feeds: set[asyncio.Task[None]] = set()
        self.is_draining = False
        self.num_retried = 0
        """Requests that went to another replica."""
        self.num_broken = 0
        """Answers that had begun and could not be ended."""

    def count_response(self, path: str, status: int) -> None:
        """One more answer over HTTP."""
        key = (path, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, or the life of the server."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _KNOWN:
            scope["route"] = "gateway"  # the layer outside counts by path only what is known
        match scope["path"]:
            case "/health" | "/ready":
                num = await self._replicas.num_running()
                status = 200 if num else 503
                body = {"status": "ok" if num else "no replica runs", "replicas": num}
                await _send_whole(send, status, "application/json", json.dumps(body).encode())
            case "/metrics":
                await _send_whole(send, 200, CONTENT_TYPE, await self._metrics())
            case _ if self.is_draining:
                headers = {"Retry-After": "5"}
                message = "The server is about to stop; send the request to another one."
                await refuse(Refusal(503, message, code="shutting_down", headers=headers), send)
            case _:
                call = await _call_of(scope, receive)
                work = asyncio.create_task(self._pass_on(call, send))
                if call.is_feed:
                    self._feeds.add(work)
                    work.add_done_callback(self._feeds.discard)
                await self._while_client_waits(work, receive)
                if call.is_feed and self.is_draining:
                    await _Outbox(send).end()

    async def drain(self) -> None:
        """Take nothing new and wait for what runs, at most `drain_s`; who watches is no answer."""
        self.is_draining = True
        for feed in list(self._feeds):
            feed.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self._drain_s)

    async def _while_client_waits(self, task: asyncio.Task[None], receive: Receive) -> None:
        self._num_open += 1
        self._idle.clear()
        client = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait([task, client], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        finally:
            task.cancel()
            client.cancel()
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    async def _metrics(self) -> bytes:
        own = [
            "# TYPE dspark_gateway_retried_requests_total counter",
            f"dspark_gateway_retried_requests_total {self.num_retried}",
            "# TYPE dspark_gateway_broken_answers_total counter",
            f"dspark_gateway_broken_answers_total {self.num_broken}",
            "# TYPE dspark_gateway_http_responses_total counter",
        ]
        for (path, status), count in self._responses.items():
            labels = f'path="{path}",status="{status}"'
            own.append(f"dspark_gateway_http_responses_total{{{labels}}} {count}")
        return merged(await self._replicas.metrics()) + "\n".join([*own, ""]).encode()

    async def _pass_on(self, call: Call, send: Send) -> None:
        for _ in range(self._max_tries):
            out = _Outbox(send)
            try:
                async with aclosing(self._replicas.respond(call)) as items:  # type: ignore[type-var]
                    async for item in items:
                        await out.put(item)
                await out.end()
                return
            except ReplicaLost as error:
                log.warning("a replica is gone: %s", error)
                if out.has_begun:
                    self.num_broken += 1
                    await out.break_off()
                    return
                self.num_retried += 1
        await refuse(
            Refusal(
                503,
                f"{self._max_tries} replicas in turn were lost with this request; try it again.",
                code="replica_lost",
                headers={"Retry-After": "5"},
            ),
            send,
        )


class _Outbox:
    """A response on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_stream = False
        self.has_begun = False

    async def put(self, item: Head | bytes) -> None:
        if isinstance(item, Head):
            headers = [(bytes(k), bytes(v)) for k, v in item.headers if k != b"x-request-id"]
            self._is_stream = any(v.startswith(b"text/event-stream") for _, v in headers)
            self.has_begun = True
            await self._send(
                {"type": "http.response.start", "status": item.status, "headers": headers}
            )
        else:
            await self._send({"type": "http.response.body", "body": item, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def break_off(self) -> None:
        if not self._is_stream:  # what was promised cannot come: the connection breaks
            raise ReplicaLost("The replica was lost in the middle of a response.")
        refusal = Refusal(503, "The replica that wrote this answer is gone; ask again.")
        await self._send(
            {"type": "http.response.body", "body": b"data: " + refusal.body() + b"\n\n"}
        )


async def _call_of(scope: Scope, receive: Receive) -> Call:
    parts, has_more = [], True
    while has_more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    hidden = {b"authorization", b"content-length", b"transfer-encoding"}
    headers = [(k, v) for k, v in scope["headers"] if k not in hidden]
    body = b"".join(parts)
    headers.append((b"content-length", str(len(body)).encode()))
    state = scope.get("state", {})
    if "request_id" in state:  # one name for a request in the logs of all processes
        headers = [(k, v) for k, v in headers if k != b"x-request-id"]
        headers.append((b"x-request-id", state["request_id"].encode()))
    return Call(
        method=scope["method"],
        path=scope["path"],
        query=scope["query_string"],
        headers=headers,
        body=body,
    )


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _send_whole(send: Send, status: int, kind: str, body: bytes) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
