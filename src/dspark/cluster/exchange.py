"""One HTTP request and its response as values that travel between processes.

`exchange` plays the web server for an ASGI application in the same process. It opens no socket.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

Headers = Sequence[tuple[bytes, bytes]]
WATCHED = b"x-dspark-watched"
"""Header of a chat on the live page: it belongs where that page watches."""
_LIVE = "/live/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = ()
    body: bytes = b""

    @property
    def is_feed(self) -> bool:
        """Whether the response never ends by itself."""
        return self.path == f"{_LIVE}events"

    @property
    def is_watched(self) -> bool:
        """Whether it belongs to the live page: all of these meet one replica."""
        return self.path.startswith(_LIVE) or any(name == WATCHED for name, _ in self.headers)

    @property
    def beginning(self) -> str:
        """The prompt's text, for who wants to send equal beginnings to one place.

        Whatever is not a prompt of the API is an empty text: it goes anywhere.
        """
        try:
            found = json.loads(self.body) if self.body else {}
        except ValueError:
            return ""
        if not isinstance(found, dict):
            return ""
        if "messages" in found:
            return json.dumps(found["messages"])
        prompt = found.get("prompt", "")
        return prompt if isinstance(prompt, str) else json.dumps(prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status and headers of a response; they come with its first token."""

    status: int
    headers: Headers


async def exchange(app: ASGIApp, call: Call) -> AsyncIterator[Head | bytes]:
    """The response: its head, then its body as it comes.

    Closing the iterator early tells the application that the client is gone.
    """
    client = _Client(call.body)
    task = asyncio.create_task(client.talk(app, call))
    try:
        while (item := await client.items.get()) is not None:
            yield item
    finally:
        client.is_gone.set()
        await asyncio.wait([task])
    await task  # raises what the application raised


class _Client:
    """The other end of an ASGI application."""

    def __init__(self, body: bytes) -> None:
        self.items: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
        self.is_gone = asyncio.Event()
        self._requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def talk(self, app: ASGIApp, call: Call) -> None:
        try:
            await app(_scope(call), self._receive, self._send)
        finally:
            self.items.put_nowait(None)

    async def _receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self.items.put_nowait(Head(status=message["status"], headers=headers))
        elif message.get("body"):
            self.items.put_nowait(message["body"])


def _scope(call: Call) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
    }
