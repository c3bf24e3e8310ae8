"""An HTTP server around the application: its socket, its signals, its end."""

import errno
import logging
import socket
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from dspark.errors import InputError
from dspark.serving.pipe import PipedProtocol

log = logging.getLogger("dspark.server")


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 takes any free one.

    Raises `InputError` for an address that is in use or not of this machine.
    """
    if not 0 <= port < 65536:
        raise InputError(f"port is {port}, but it must lie in 0..65535.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"Port {port} of {host} is in use by another program; stop it or give --port."
            ) from error
        reason = error.strerror or str(error)
        raise InputError(f"Nothing can listen at {host}:{port} ({reason}); give --host.") from error
    found.listen(512)
    return found


class Line(Protocol):
    """Who takes requests: the bridge to the engine, or a gateway to several of them."""

    is_draining: bool
    """Nothing new is taken."""

    async def drain(self) -> None:
        """Take nothing new and wait, for a bounded time, until what runs has ended."""


class Server(uvicorn.Server):
    """Stops gracefully: the first signal refuses new work and lets answers end, a second one ends
    them."""

    def __init__(self, app: ASGIApp, line: Line) -> None:
        self._line = line
        super().__init__(
            uvicorn.Config(
                app,
                http=PipedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        del frame  # where the program was tells nothing
        log.info("signal %d: running answers may end, nothing new is taken", sig)
        self._line.is_draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs end within the line's own time, then close all connections."""
        await self._line.drain()
        await super().shutdown(sockets)
