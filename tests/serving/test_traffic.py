"""Clients that leave, that do not read, that are too many; and the end of the server."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dspark.llm import LLM
from dspark.serving.app import App, AppConfig
from dspark.serving.bridge import BridgeConfig
from tests.serving.conftest import serving

LONG = {"prompt": "Hello", "temperature": 0, "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "Hello", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def until(is_true: Callable[[], bool]) -> None:
    """Wait for what must come; a hang fails by the runner's own limit."""
    for _ in range(20_000):
        if is_true():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come")


def is_idle(app: App) -> bool:
    load = app.service.bridge.gauges().load
    return app.service.bridge.num_open == 0 and load.num_running + load.num_waiting == 0


def raw_request(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    host, port = url.removeprefix("http://").split(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    found.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    found.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
    return found


def leave_by_fin(found: socket.socket) -> None:
    found.close()


def leave_by_half(found: socket.socket) -> None:
    found.shutdown(socket.SHUT_WR)


def leave_by_reset(found: socket.socket) -> None:
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    found.close()


@pytest.mark.parametrize("leave", [leave_by_fin, leave_by_half, leave_by_reset])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_one_who_leaves_frees_its_place(
    live: tuple[App, str], leave: Callable[[socket.socket], None], is_streamed: bool
) -> None:
    """UC-059."""
    app, url = live
    before = app.service.bridge.meter.num_cancelled
    expected = httpx.post(f"{url}/v1/completions", json=SHORT).json()["choices"]
    found = raw_request(url, {**LONG, "stream": is_streamed})
    if is_streamed:
        assert found.recv(512).startswith(b"HTTP/1.1 200")
    else:
        until(lambda: app.service.bridge.gauges().load.num_running == 1)
    leave(found)
    until(lambda: app.service.bridge.meter.num_cancelled == before + 1)
    assert is_idle(app)
    assert httpx.post(f"{url}/v1/completions", json=SHORT).json()["choices"] == expected
    found.close()


def test_one_who_does_not_read_is_cut_off_and_stops_nobody(llm: LLM) -> None:
    bridge = BridgeConfig(max_unread=4)
    body = {**LONG, "logprobs": 20}
    with serving(llm, bridge=bridge, send_buffer=4096) as (app, url, _):
        found = raw_request(url, body)
        assert len(httpx.post(f"{url}/v1/completions", json=SHORT).json()["choices"]) == 1
        until(lambda: app.service.bridge.meter.num_cancelled == 1)
        assert is_idle(app)
        received = b""
        while part := found.recv(65536):
            received += part
        found.close()
        assert b"[DONE]" not in received


def test_more_than_the_line_holds_are_told_when_to_come_again(llm: LLM) -> None:
    with serving(llm, bridge=BridgeConfig(max_waiting=1)) as (app, url, _):
        many = raw_request(url, {**LONG, "n": 4})
        until(lambda: app.service.bridge.num_open == 4)
        waits = raw_request(url, LONG)
        until(lambda: app.service.bridge.num_open == 5)
        reply = httpx.post(f"{url}/v1/completions", json=SHORT)
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"
        assert reply.json()["error"]["code"] == "queue_full"
        never = httpx.post(f"{url}/v1/completions", json={**SHORT, "n": 6})
        assert never.status_code == 400
        assert never.json()["error"]["param"] == "n"
        many.close()
        waits.close()
        until(lambda: is_idle(app))
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 200


def test_a_deadline_ends_an_answer_before_and_after_its_first_token(llm: LLM) -> None:
    with serving(llm) as (app, url, _):
        now = [0.0]
        app.service.bridge._engine._clock = lambda: now[0]
        app.service.bridge.clock = lambda: now[0]
        started = raw_request(url, {**LONG, "deadline_s": 5.0})
        assert started.recv(512).startswith(b"HTTP/1.1 200")
        now[0] = 5.0
        received = b""
        while b"deadline_exceeded" not in received:
            received += started.recv(65536)
        assert b"[DONE]" not in received
        started.close()
        late = httpx.post(
            f"{url}/v1/completions", json={**LONG, "stream": False, "deadline_s": 1e-300}
        )
        assert late.status_code == 504
        assert late.json()["error"]["type"] == "timeout_error"


def test_a_failing_step_is_an_error_and_the_server_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(llm) as (app, url, _):
        started = raw_request(url, LONG)
        assert started.recv(512).startswith(b"HTTP/1.1 200")
        planner = llm.cycle(speculation=True).planner
        caps = planner.caps

        def broken(*args: Any) -> Any:
            monkeypatch.setattr(planner, "caps", caps)
            raise RuntimeError("planted")

        monkeypatch.setattr(planner, "caps", broken)
        received = b""
        while b"engine_failed" not in received:
            received += started.recv(65536)
        started.close()
        monkeypatch.setattr(planner, "caps", broken)
        whole = httpx.post(f"{url}/v1/completions", json=SHORT)
        assert whole.status_code == 500
        assert whole.json()["error"]["code"] == "engine_failed"
        assert "planted" not in whole.text
        assert httpx.post(f"{url}/v1/completions", json=SHORT).status_code == 200
        assert is_idle(app)


def test_a_server_that_stops_lets_answers_end(llm: LLM) -> None:
    body = {**LONG, "max_tokens": 100}
    with serving(llm) as (app, url, server):
        expected = httpx.post(f"{url}/v1/completions", json={**body, "stream": False}).json()
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            server.handle_exit(15, None)
            assert app.service.bridge.is_draining
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in [first, *rest[:-1]]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == expected["choices"][0]["text"]
    assert not app.service.bridge.is_alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_server_that_stops_does_not_wait_for_ever(llm: LLM) -> None:
    with serving(llm, bridge=BridgeConfig(drain_s=0.0)) as (_, url, server):
        found = raw_request(url, LONG)
        assert found.recv(512).startswith(b"HTTP/1.1 200")
        server.handle_exit(15, None)
        received = b""
        while part := found.recv(65536):
            received += part
        found.close()
    assert b"shutting_down" in received
    assert b"[DONE]" not in received


def test_nothing_new_is_taken_while_the_server_stops(llm: LLM) -> None:
    with serving(llm) as (app, url, _), httpx.Client(base_url=url) as client:
        assert client.get("/ready").status_code == 200
        app.service.bridge.is_draining = True
        assert client.get("/ready").status_code == 503
        reply = client.post("/v1/completions", json=SHORT)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in reply.headers
        assert client.get("/health").status_code == 200


def test_many_at_once_get_what_each_gets_alone(live: tuple[App, str]) -> None:
    app, url = live
    prompts = [f"Hello {i} of the end" for i in range(12)]
    bodies = [{**SHORT, "prompt": prompt, "max_tokens": 20} for prompt in prompts]

    def answer(body: dict[str, Any]) -> str:
        return str(httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"])

    expected = list(map(answer, bodies))
    found = [""] * len(bodies)

    def work(i: int) -> None:
        found[i] = answer(bodies[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert is_idle(app)


def test_a_page_of_other_origins_is_not_let_in_by_default() -> None:
    assert AppConfig().cors_origins == ()
