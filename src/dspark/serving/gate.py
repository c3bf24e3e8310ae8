"""What every request passes before it is looked at: its id, the key, the size, the log line.

A plain ASGI layer, so that a stream's chunks cost next to nothing here. It knows no API.
"""

import base64
import binascii
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.serving.refusals import Refusal

log = logging.getLogger("dspark.requests")

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key; they tell nothing but that the server is there."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """The layer around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        on_response: Callable[[str, int], None],
    ) -> None:
        """`on_response` is told path and status of every response."""
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _ID.fullmatch(request_id):
            request_id = f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        passage = _Passage(scope, send, request_id, self._on_response)
        refusal = self._refusal(scope, headers)
        try:
            if refusal is not None:
                await refuse(refusal, passage.send)
            else:
                await self._app(scope, self._limited(receive), passage.send)
        finally:
            passage.end()

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if scope["path"] not in OPEN_PATHS and not self._is_known(headers):
            return Refusal(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                # a browser asks for a password, and sends it with all that the page asks for
                headers={"WWW-Authenticate": 'Bearer, Basic realm="dspark", charset="UTF-8"'},
            )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _is_known(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = value.strip().encode("latin-1", "replace")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                given = b""
        elif kind.lower() != "bearer":
            given = b""
        return hmac.compare_digest(given, self._api_key)

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                refusal = self._too_large()
                raise HTTPException(refusal.status, refusal.message)
            return message

        return limited

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The request is larger than {self._max_body_bytes} bytes; shorten it.")


class _Passage:
    """One response on its way out."""

    def __init__(
        self, scope: Scope, send: Send, request_id: str, on_response: Callable[[str, int], None]
    ) -> None:
        self._scope = scope
        self._send = send
        self._request_id = request_id
        self._on_response = on_response
        self._started_s = time.monotonic()
        self._status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self._request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    def end(self) -> None:
        path = self._scope["path"]
        status = self._status or 499  # the client left before anything was sent
        # paths that are none of ours are one, or anybody could fill the metrics with names
        self._on_response(path if "route" in self._scope else "other", status)
        log.info(
            "%s %s %d",
            self._scope["method"],
            path,
            status,
            extra={
                "request_id": self._request_id,
                "status": status,
                "seconds": round(time.monotonic() - self._started_s, 4),
                **self._scope["state"].get("log", {}),
            },
        )


async def refuse(refusal: Refusal, send: Send) -> None:
    """Send a refusal as a whole response."""
    body = refusal.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **refusal.headers,
    }
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
