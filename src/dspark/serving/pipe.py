"""The short way of a stream's bytes: from a response to its connection, past all layers between.

A message of ASGI passes half a dozen coroutines; with one for every client and step, that is most
of what a stream costs. The web server offers the short way in the scope, under a name of ours; an
application finds none where another server, or a test, stands in front of it.
"""

from typing import Any, Protocol

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_NAME = "dspark.pipe"


class Pipe(Protocol):
    """An open response of a connection. Only its middle goes through here: beginning and end are
    messages as ever."""

    @property
    def is_full(self) -> bool:
        """Whether the client reads slower than it is written to."""

    def write(self, body: bytes) -> None:
        """Send a piece, not empty, of a body whose length was not told."""


def pipe_of(scope: Scope) -> Pipe | None:
    """The pipe of a request, if there is one."""
    found: Pipe | None = scope.get("extensions", {}).get(_NAME)
    return found


class PipedProtocol(H11Protocol):
    """A connection that offers a pipe to every request, and is one itself: it has one response at a
    time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._app = self.app
        self.app = self._offer

    @property
    def is_full(self) -> bool:
        """As `Pipe` has it."""
        return self.flow.write_paused

    def write(self, body: bytes) -> None:
        """As `Pipe` has it: a chunk of HTTP/1.1."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    async def _offer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":  # older ones know no chunks
            scope["extensions"] = {_NAME: self}
        await self._app(scope, receive, send)
