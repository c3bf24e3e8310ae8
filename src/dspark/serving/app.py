"""The routes. Each does three things: take a request, hand it on, and give what came back."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.errors import DSparkError, InputError
from dspark.llm import LLM
from dspark.machine import installed_version
from dspark.serving.bridge import Bridge, BridgeConfig, Busy, Draining
from dspark.serving.crowd import Crowd
from dspark.serving.gate import Gate
from dspark.serving.metrics import CONTENT_TYPE, Metrics
from dspark.serving.orders import Limits, OrderDesk
from dspark.serving.protocol import ChatRequest, CompletionRequest, CrowdSize, ErrorReply
from dspark.serving.refusals import Refusal
from dspark.serving.replies import Reply
from dspark.serving.wire import Wishes, Writer
from dspark.serving.work import Order

log = logging.getLogger("dspark.app")

LIVE_FOLDER = Path(__file__).parent / "live"
"""The page at /."""
_MOST_BODY_BYTES = 8 * 2**20
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 404, 413, 429, 500, 503, 504)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """What the server lets in, and under which name it answers."""

    served_name: str | None = None
    """The model's name in the API; `None`: the name that it was loaded by."""
    api_key: str | None = None
    """What clients must send on every route but /health; `None` asks for nothing."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call; none by default."""
    max_body_bytes: int | None = None
    """Bytes of a request, at most; `None`: what a prompt of the model's context may take."""
    chat_tokens: int | None = None
    """Tokens of a chat answer whose request names no limit; `None`: what context and cache hold."""

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise InputError("api_key must be a word of plain ASCII characters.")
        if self.served_name == "":
            raise InputError("served_name is empty; give a name, or leave it out.")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InputError(
                    f"cors_origin is {origin!r}, but it must be an origin such as "
                    "https://example.org, or * for all."
                )
        for name in ("max_body_bytes", "chat_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}, but it must be at least 1.")


def body_limit(max_positions: int | None) -> int:
    """Bytes of a request whose prompt may fill the context, or any (`None`).

    A body is read in one go, in which neither the event loop nor the engine gets the interpreter:
    8 MiB of tiny messages take seconds. A token has about 4 bytes; written as escapes, few have
    more than 64.
    """
    if max_positions is None:
        return _MOST_BODY_BYTES
    return min(max(2**20, 64 * max_positions), _MOST_BODY_BYTES)


class Service:
    """What the routes share: the bridge to the engine, and one thread that reads prompts."""

    def __init__(
        self,
        llm: LLM,
        config: AppConfig,
        bridge_config: BridgeConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm = llm
        self.config = config
        self.bridge = Bridge(llm, bridge_config, clock=clock)
        self.metrics = Metrics(self.bridge.meter, self.bridge.gauges)
        self.name = config.served_name or llm.target.spec.name
        self.created = int(time.time())
        self._desk = OrderDesk(
            llm, Limits(chat_tokens=config.chat_tokens, deadline_s=bridge_config.deadline_s)
        )
        # one thread: a tokenizer is not made for several at a time
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dspark-reader")
        self.crowd = Crowd(self.bridge, self._prepare)

    async def start(self) -> None:
        """Begin to answer."""
        self.bridge.start()

    async def stop(self) -> None:
        """Let what runs end, then stop."""
        await self.bridge.drain()
        await self.bridge.stop()
        self._reader.shutdown()

    async def chat(self, body: ChatRequest) -> Response:
        """The reply to a conversation."""
        wishes = Wishes(
            is_chat=True,
            has_tools=bool(body.usable_tools),
            has_logprobs=body.logprobs or False,
            **_stream_wishes(body),
        )
        return await self._reply(body, wishes, "chatcmpl")

    async def completion(self, body: CompletionRequest) -> Response:
        """The reply to plain prompts."""
        wishes = Wishes(
            is_chat=False, has_logprobs=body.logprobs is not None, **_stream_wishes(body)
        )
        return await self._reply(body, wishes, "cmpl")

    async def _reply(
        self, body: ChatRequest | CompletionRequest, wishes: Wishes, prefix: str
    ) -> Response:
        self._check_name(body.model)
        is_streamed = bool(body.stream)
        order = await self._prepare(body, f"{prefix}-{secrets.token_hex(12)}")
        if len(order.requests) > self.bridge.capacity:
            raise Refusal(
                400,
                f"{len(order.requests)} answers are asked for, but this server holds "
                f"{self.bridge.capacity} at most.",
                param="n",
            )
        writer = Writer(
            order,
            wishes,
            created=int(time.time()),
            model=self.name,
            tokenizer=self.llm.tokenizer,
        )
        stream = self.bridge.submit(order, is_whole=not is_streamed)
        return Reply(
            self.bridge, stream, writer, is_streamed=is_streamed, has_usage=wishes.has_usage
        )

    async def _prepare(self, body: ChatRequest | CompletionRequest, order_id: str) -> Order:
        return await asyncio.get_running_loop().run_in_executor(
            self._reader, self._order, body, order_id
        )

    def _order(self, body: ChatRequest | CompletionRequest, order_id: str) -> Order:
        now_s = self.bridge.clock()
        if isinstance(body, ChatRequest):
            return self._desk.chat(body, order_id=order_id, now_s=now_s)
        return self._desk.completion(body, order_id=order_id, now_s=now_s)

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Refusal(
                404,
                f"This server has no model {name!r}; it answers as {self.name!r}.",
                param="model",
                code="model_not_found",
            )


def _stream_wishes(body: ChatRequest | CompletionRequest) -> dict[str, bool]:
    options = body.stream_options
    return {
        "has_token_ids": body.return_token_ids or False,
        "has_usage": options is not None and options.include_usage,
        "has_running_usage": options is not None and options.continuous_usage_stats,
    }


class App:
    """The whole server as an ASGI application."""

    def __init__(
        self,
        llm: LLM,
        config: AppConfig | None = None,
        bridge_config: BridgeConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = AppConfig() if config is None else config
        self.service = Service(llm, config, bridge_config or BridgeConfig(), clock=clock)
        self.api = _api(self.service)
        layers: ASGIApp = Gate(
            self.api,
            api_key=config.api_key,
            max_body_bytes=config.max_body_bytes or body_limit(llm.target.spec.max_positions),
            on_response=self.service.metrics.count_response,
        )
        self._layers = with_origins(layers, config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, or the life of the server."""
        await self._layers(scope, receive, send)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Web pages of these origins may call; it stands outside the gate, for a browser asks first,
    without the key."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def _api(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    api = FastAPI(
        title="dspark",
        version=installed_version("dspark") or "0",
        lifespan=lifespan,
        docs_url=None,  # their scripts come from other servers
        redoc_url=None,
    )
    _add_errors(api)
    _add_api(api, service)
    _add_operations(api, service)
    _add_page(api)  # last: its names come after all others
    return api


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS, response_model=None)
    async def chat(body: ChatRequest) -> Response:
        """Answer a conversation, whole or as a stream."""
        return await service.chat(body)

    @app.post("/v1/completions", responses=_ERRORS, response_model=None)
    async def completion(body: CompletionRequest) -> Response:
        """Continue plain prompts, whole or as a stream."""
        return await service.completion(body)

    def model() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "dspark",
            "max_model_len": service.llm.target.spec.max_positions,
        }

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str) -> dict[str, Any]:
        """The model, if that is its name."""
        service._check_name(name)
        return model()


def _add_page(app: FastAPI) -> None:
    files = StaticFiles(directory=LIVE_FOLDER)

    async def page(request: Request) -> Response:
        """The live page and its files."""
        return await files.get_response(
            request.scope["path"].removeprefix("/") or "index.html", request.scope
        )

    # by name and no mount: a mount at / would take wrong methods of other paths for its own
    for name in ("", *sorted(file.name for file in LIVE_FOLDER.iterdir())):
        app.add_api_route(f"/{name}", page, methods=["GET", "HEAD"], include_in_schema=False)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {}})
    async def health() -> Response:
        """Whether the engine lives."""
        is_alive = service.bridge.is_alive
        return JSONResponse(
            {"status": "ok" if is_alive else "dead"}, status_code=200 if is_alive else 503
        )

    @app.get("/ready", responses={503: {}})
    async def ready() -> Response:
        """Whether new requests are taken."""
        is_ready = service.bridge.is_alive and not service.bridge.is_draining
        return JSONResponse(
            {"status": "ready" if is_ready else "draining"}, status_code=200 if is_ready else 503
        )

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/live/events", response_class=StreamingResponse, responses=_ERRORS)
    async def live() -> Response:
        """What every step does, as server-sent events; see `dspark.serving.events`."""
        feed = service.bridge.feed
        listener = feed.join()
        if listener is None:
            raise Refusal(429, "Too many watch already.", headers={"Retry-After": "10"})

        async def events() -> AsyncIterator[bytes]:
            try:
                yield f"data: {{{feed.hello()}}}\n\n".encode()
                async for data in listener.read():
                    yield data
            finally:
                feed.leave(listener)

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    @app.get("/live/crowd", responses=_ERRORS)
    async def crowd() -> dict[str, int]:
        """The live page's synthetic users: how many there are, and may be."""
        return {"users": service.crowd.size, "most": service.crowd.most}

    @app.post("/live/crowd", responses=_ERRORS)
    async def resize(body: CrowdSize) -> dict[str, int]:
        """Let synthetic users come or go. They leave when nobody watches the feed."""
        service.crowd.resize(body.users)
        return {"users": service.crowd.size, "most": service.crowd.most}


def _add_errors(app: FastAPI) -> None:
    def reply(refusal: Refusal) -> Response:
        return Response(
            refusal.body(),
            status_code=refusal.status,
            headers=refusal.headers,
            media_type="application/json",
        )

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Refusal) -> Response:
        return reply(error)

    @app.exception_handler(DSparkError)
    async def wrong(_: Request, error: DSparkError) -> Response:
        return reply(Refusal.of_error(error))

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        headers = {"Retry-After": str(error.retry_after_s)}
        return reply(Refusal(429, str(error), code="queue_full", headers=headers))

    @app.exception_handler(Draining)
    async def draining(_: Request, error: Draining) -> Response:
        return reply(Refusal(503, str(error), code="shutting_down", headers={"Retry-After": "5"}))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return reply(Refusal.of_fields(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        if error.status_code not in (404, 405):
            return reply(Refusal(error.status_code, str(error.detail), headers=headers))
        refusal = Refusal.of_route(
            error.status_code,
            request.method,
            request.scope["path"],
            headers.get("Allow", "another"),
        )
        refusal.headers.update(headers)
        return reply(refusal)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return reply(Refusal(500, "The server made a mistake; its log says more."))
