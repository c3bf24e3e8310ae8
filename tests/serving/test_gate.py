"""Keys, ids, sizes, origins and log lines, without a socket."""

import asyncio
import base64
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark.llm import LLM
from dspark.serving.app import App, AppConfig, body_limit
from dspark.serving.gate import Gate
from dspark.serving.protocol import MOST_MESSAGES

KEY = "sesame"
PATHS = ("/v1/models", "/metrics", "/", "/ready", "/openapi.json", "/live/events", "/nothing")


def call(app: Any, *args: Any, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(*args, **options)

    return asyncio.run(send())


@pytest.fixture
def make(llm: LLM) -> Callable[..., App]:
    """An application whose engine does not run."""

    def made(**options: Any) -> App:
        return App(llm, AppConfig(served_name="toy", **options))

    return made


@pytest.mark.parametrize("path", PATHS)
def test_every_route_asks_for_the_key(make: Callable[..., App], path: str) -> None:
    app = make(api_key=KEY)
    basic = base64.b64encode(f"any:{KEY}".encode()).decode()
    for wrong in (None, "Bearer other", f"Bearer {KEY}x", KEY, "Basic !!", "Bearer", "Bearer é"):
        headers = {} if wrong is None else {"Authorization": wrong.encode()}
        reply = call(app, "GET", path, headers=headers)
        assert reply.status_code == 401, wrong
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert "Bearer" in reply.headers["www-authenticate"]
    if path == "/live/events":
        return  # it would not end
    for right in (f"Bearer {KEY}", f"bearer {KEY}", f"Basic {basic}"):
        assert call(app, "GET", path, headers={"Authorization": right}).status_code != 401


def test_health_tells_no_secret(make: Callable[..., App]) -> None:
    reply = call(make(api_key=KEY), "GET", "/health")
    assert reply.status_code == 503  # its engine does not run
    assert set(reply.json()) == {"status"}


def test_a_request_keeps_its_id_or_gets_one(make: Callable[..., App]) -> None:
    app = make()
    given = call(app, "GET", "/v1/models", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 129):
        found = call(app, "GET", "/v1/models", headers={"X-Request-Id": bad})
        assert found.headers["x-request-id"].startswith("req-")


def test_a_large_request_is_refused(make: Callable[..., App]) -> None:
    app = make(max_body_bytes=100)
    headers = {"Content-Type": "application/json"}
    known = call(app, "POST", "/v1/completions", content=b"x" * 101, headers=headers)

    async def parts() -> Any:
        for _ in range(11):
            yield b"x" * 10

    unknown = call(app, "POST", "/v1/completions", content=parts(), headers=headers)
    for reply in (known, unknown):
        assert reply.status_code == 413
        assert "100 bytes" in reply.json()["error"]["message"]


def test_a_body_may_be_as_large_as_a_context_needs(make: Callable[..., App]) -> None:
    assert body_limit(1024) == 2**20
    assert body_limit(32_768) == 64 * 32_768
    assert body_limit(10**6) == body_limit(None) == 8 * 2**20
    app = make()  # a context of 1,024 positions
    headers = {"Content-Type": "application/json"}
    for size, status in ((2**20, 400), (2**20 + 1, 413)):
        reply = call(app, "POST", "/v1/completions", content=b" " * size, headers=headers)
        assert reply.status_code == status


def test_a_list_of_messages_without_end_is_not_read_to_its_end(make: Callable[..., App]) -> None:
    message = {"role": "user", "content": ""}
    body = {"messages": [message] * MOST_MESSAGES + [{"role": "nobody"}] * 3}
    reply = call(make(), "POST", "/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert str(MOST_MESSAGES) in reply.json()["error"]["message"]
    assert "nobody" not in reply.text


def test_origins_are_let_in_by_name_only(make: Callable[..., App]) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    closed = call(make(), "OPTIONS", "/v1/completions", headers=ask)
    assert "access-control-allow-origin" not in closed.headers
    app = make(cors_origins=("https://page.example",), api_key=KEY)
    opened = call(app, "OPTIONS", "/v1/completions", headers=ask)
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == "https://page.example"
    other = call(app, "OPTIONS", "/v1/completions", headers={**ask, "Origin": "https://else"})
    assert "access-control-allow-origin" not in other.headers


def test_a_response_is_logged_and_counted(
    make: Callable[..., App], caplog: pytest.LogCaptureFixture
) -> None:
    app = make()
    with caplog.at_level(logging.INFO, logger="dspark.requests"):
        call(app, "GET", "/v1/models", headers={"X-Request-Id": "abc"})
        call(app, "GET", "/some/other/path")
    record = caplog.records[0]
    assert record.getMessage() == "GET /v1/models 200"
    assert vars(record)["request_id"] == "abc"
    text = app.service.metrics.text().decode()
    assert 'dspark_http_responses_total{path="/v1/models",status="200"} 1.0' in text
    assert 'path="other",status="404"' in text
    assert "/some/other" not in text


def test_a_mistake_of_ours_is_an_error_of_the_api(make: Callable[..., App]) -> None:
    app = make()

    @app.api.router.get("/broken", include_in_schema=False)
    async def broken() -> None:
        raise KeyError("secret inside")

    app.api.router.routes.insert(0, app.api.router.routes.pop())
    reply = call(app, "GET", "/broken")
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text


def test_what_is_no_request_passes() -> None:
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    gate = Gate(inner, api_key=KEY, max_body_bytes=1, on_response=lambda *_: None)
    asyncio.run(gate({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
