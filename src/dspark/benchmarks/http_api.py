"""An OpenAI-compatible server as a client sees it: one JSON answer, or the events of a stream.

One connection a request, blocking, so that callers use threads. It knows HTTP, JSON and SSE, not
what the answers mean.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from dspark.data.endpoints import check_base
from dspark.errors import ServerFault

_SAID = 300  # characters of an error's body that a message repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a stream."""

    at_s: float
    """`time.perf_counter` when it was read."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpApi:
    """A server by its base URL. Every failure is a `ServerFault` with a short name."""

    url: str
    """Ends in /v1, or is the server's root, to which /v1 is added."""
    api_key: str | None = None
    timeout_s: float = 600.0
    """Longest silence of the server."""

    def __post_init__(self) -> None:
        check_base(self.url, name="url")

    def get(self, path: str) -> Mapping[str, Any]:
        """The JSON object at `path`, such as /models."""
        return self._json("GET", path, None)

    def page(self, path: str) -> str:
        """The text at `path` of the server itself, such as /metrics."""
        connection, response = self._open("GET", path, None, is_api=False)
        try:
            return response.read().decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise _fault_of(error, self.url) from error
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The JSON object that answers `body`."""
        return self._json("POST", path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """Events as they come, up to the server's [DONE]."""
        connection, response = self._open("POST", path, {**body, "stream": True})
        try:
            yield from self._events(response)
        except (OSError, HTTPException) as error:
            raise _fault_of(error, self.url) from error
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        connection, response = self._open(method, path, body)
        try:
            found = json.loads(response.read())
        except (OSError, HTTPException) as error:
            raise _fault_of(error, self.url) from error
        except ValueError as error:
            raise ServerFault("not JSON", f"{self.url} answered with no JSON.") from error
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise ServerFault("not JSON", f"{self.url} answered with no JSON object.")
        return found

    def connection(self) -> HTTPConnection:
        """A connection of its own, for who wants to be rude to the server."""
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self.timeout_s)

    def send(
        self,
        connection: HTTPConnection,
        method: str,
        path: str,
        content: bytes | None,
        *,
        is_api: bool = True,
    ) -> None:
        """Send a request, whatever its content is, and read nothing."""
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + ("/v1" if is_api else "")
        connection.request(method, base + path, content, headers)

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_api: bool = True
    ) -> tuple[HTTPConnection, HTTPResponse]:
        content = None if body is None else json.dumps(body).encode()
        connection = self.connection()
        try:
            self.send(connection, method, path, content, is_api=is_api)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response, self.url)
        except (OSError, HTTPException) as error:
            connection.close()
            raise _fault_of(error, self.url) from error
        except ServerFault:
            connection.close()
            raise
        return connection, response

    def _events(self, response: HTTPResponse) -> Iterator[Event]:
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            at_s, payload = time.perf_counter(), line[5:].strip()
            if payload == b"[DONE]":
                return
            try:
                data = json.loads(payload)
            except ValueError as error:
                raise ServerFault("not JSON", f"{self.url} sent an event without JSON.") from error
            if "error" in data:
                said = str(data["error"])[:_SAID]
                raise ServerFault("error in stream", f"{self.url} broke an answer off: {said}")
            yield Event(at_s=at_s, data=data)
        raise ServerFault("cut stream", f"{self.url} closed a stream before its end.")


def _refusal(response: HTTPResponse, url: str) -> ServerFault:
    said = response.read(_SAID).decode(errors="replace").strip()
    name = f"HTTP {response.status}"
    return ServerFault(name, f"{url} answered {name}: {said or 'nothing more'}")


def _fault_of(error: Exception, url: str) -> ServerFault:
    match error:
        case TimeoutError():
            name = "timeout"
        case ConnectionRefusedError():
            name = "connection refused"
        case OSError():
            name = "connection lost"
        case _:
            name = "broken HTTP"
    return ServerFault(name, f"{url}: {name} ({error}).")


def first_model(api: HttpApi) -> str:
    """The first model that the server lists."""
    try:
        return str(api.get("/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerFault("no models", f"{api.url} lists no model; name one by --model.") from error
