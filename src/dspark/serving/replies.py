"""Responses of the two completion routes: the whole answer, or a stream of events.

Both read one `Stream` and notice at once when the client leaves. It knows no model.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark.serving.bridge import Bridge
from dspark.serving.gate import refuse
from dspark.serving.pipe import Pipe, pipe_of
from dspark.serving.refusals import Refusal
from dspark.serving.stream import ClientGone, Stream
from dspark.serving.wire import DONE, Writer
from dspark.serving.work import Failure, Piece

log = logging.getLogger("dspark.replies")

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply(Response):
    """A response made of an order's pieces; sent by reading them."""

    def __init__(
        self, bridge: Bridge, stream: Stream, writer: Writer, *, is_streamed: bool, has_usage: bool
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._stream = stream
        self._writer = writer
        self._is_streamed = is_streamed
        self._has_usage = has_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; the order is cancelled if the client leaves, whatever it waits for."""
        listener = asyncio.create_task(_departure(receive, self._stream.leave))
        try:
            if self._is_streamed:
                await self._send_events(scope, send)
            else:
                await self._send_whole(scope, send)
        except ClientGone:
            pass
        finally:
            listener.cancel()
            self._bridge.cancel(self._stream)

    async def _send_whole(self, scope: Scope, send: Send) -> None:
        items = await self._stream.get()
        failure = next((item for item in items if isinstance(item, Failure)), None)
        if failure is not None:
            self._tell_log(scope)
            await refuse(Refusal.of_failure(failure), send)
            return
        body = self._writer.whole([item for item in items if isinstance(item, Piece)])
        self._tell_log(scope)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, scope: Scope, send: Send) -> None:
        items = await self._stream.get()
        if isinstance(items[0], Failure):  # nothing was sent yet: it can have a status of its own
            self._tell_log(scope)
            await refuse(Refusal.of_failure(items[0]), send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        pipe = pipe_of(scope)
        pour = None if pipe is None else partial(self._pour, pipe)
        while True:
            body = "".join(map(self._event, items)).encode()
            is_over = self._stream.is_over
            has_failed = isinstance(items[-1], Failure)
            if is_over and not has_failed:
                body += self._writer.usage_chunk().encode() if self._has_usage else b""
                body += DONE
            if is_over:
                self._tell_log(scope)
            if body and not await self._send_part(send, body, is_last=is_over):
                return
            if is_over:
                return
            items = await self._stream.get(pour)

    def _pour(self, pipe: Pipe, items: Sequence[Piece | Failure]) -> bool:
        """Running pieces straight to the connection, past the layers that a message goes through;
        false if the connection holds too much already."""
        if pipe.is_full:
            return False
        try:
            body = "".join(map(self._event, items)).encode()
        except Exception:  # this client's own; its task will meet it
            return False
        if body:
            pipe.write(body)
        return True

    async def _send_part(self, send: Send, body: bytes, *, is_last: bool) -> bool:
        """Send a part; false if the client did not read and lost its answer meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        was_cut = False

        def cut() -> None:
            nonlocal was_cut
            was_cut = True
            task.cancel()

        self._stream.on_overflow = cut  # `send` waits for the client, as long as it likes
        try:
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except asyncio.CancelledError:
            if not was_cut:
                raise
            task.uncancel()
            log.warning("an answer was not read and is given up")
            return False
        finally:
            self._stream.on_overflow = None
        return True

    def _event(self, item: Piece | Failure) -> str:
        if isinstance(item, Failure):  # no [DONE] after it: the answer is not whole
            return f"data: {Refusal.of_failure(item).body().decode()}\n\n"
        return self._writer.chunk(item)

    def _tell_log(self, scope: Scope) -> None:
        usage = self._writer.usage()
        scope["state"]["log"] = {
            "order": self._stream.order.id,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            **usage["speculation"],
        }


async def _departure(receive: Receive, then: Callable[[], None]) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    then()
