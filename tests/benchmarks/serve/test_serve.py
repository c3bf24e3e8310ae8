"""Figures of a served load from calls with known times; crowds against servers of a few lines."""

import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark.benchmarks.http_api import Event, HttpApi
from dspark.benchmarks.serve.call import ABANDONED, NO_USAGE, Call, call
from dspark.benchmarks.serve.config import Load, LoadKind, ServeBenchConfig
from dspark.benchmarks.serve.crowd import Crowd, measure
from dspark.benchmarks.serve.point import point_of
from dspark.benchmarks.serve.report import (
    PointsFile,
    ServeReport,
    measure_all,
    print_serve,
    save_frontier,
)
from dspark.errors import InputError, ServerFault

CONFIG = ServeBenchConfig(seconds=10.0, sla_ttft_ms=150.0, sla_itl_ms=12.0)
TWO = Load(kind=LoadKind.CLOSED, level=2)
CHATS = [[{"role": "user", "content": f"prompt {i}"}] for i in range(3)]


def streamed(start_s: float, *sizes: int, tokens: int, wait_s: float = 0.1) -> Call:
    """Text after `wait_s`, then every 10 ms."""
    arrivals = [(start_s + wait_s + 0.01 * i, size) for i, size in enumerate(sizes)]
    return Call(
        start_s=start_s,
        end_s=arrivals[-1][0],
        num_tokens=tokens,
        num_prompt_tokens=5,
        arrivals=arrivals,
        fault=None,
    )


def broken(start_s: float, fault: str) -> Call:
    return Call(
        start_s=start_s,
        end_s=start_s,
        num_tokens=0,
        num_prompt_tokens=0,
        arrivals=(),
        fault=fault,
    )


def test_time_between_tokens_is_not_that_between_chunks() -> None:
    """UC-149: 10 ms steps with 1, 3 and 4 tokens: 20 ms for the 7 tokens behind the first."""
    found = streamed(0.0, 4, 12, 16, tokens=8)
    assert found.ttft_s == pytest.approx(0.1)
    assert found.itl_s == pytest.approx(0.02 / 7)
    assert list(found.gaps_s) == pytest.approx([0.01, 0.01])


def test_tokens_of_a_window_are_the_usage_spread_over_the_text() -> None:
    found = streamed(0.0, 10, 30, tokens=8)
    assert found.tokens_between(0.0, 0.105) == pytest.approx(2.0)
    assert found.tokens_between(0.0, 1.0) == 8.0


def test_the_figures_of_a_point() -> None:
    calls = [
        streamed(1.0, 4, 4, 4, tokens=5),  # 4 tokens in 20 ms
        streamed(2.0, 4, 4, tokens=2, wait_s=0.2),  # too late a first token
        streamed(9.995, 8, 8, tokens=4, wait_s=0.0),  # half of it behind the end
        streamed(-0.1, 6, 6, tokens=6),  # began before: its tokens count, its times do not
        broken(3.0, "HTTP 500"),
        broken(11.0, "HTTP 500"),
    ]
    point = point_of(TWO, Crowd(calls=calls, start_s=0.0, end_s=10.0), CONFIG)
    assert (point.num_requests, point.errors) == (4, 1)
    assert point.error_names == {"HTTP 500": 1}
    assert point.tokens_per_s == pytest.approx((5 + 2 + 2 + 6) / 10)
    assert point.per_user_tokens_per_s == pytest.approx((4 + 1 + 3) / (0.02 + 0.01 + 0.01))
    assert point.ttft_ms == pytest.approx({"p50": 100.0, "p99": 198.0})
    assert point.itl_ms is not None
    assert point.itl_ms["p50"] == pytest.approx(5.0)
    assert point.goodput_per_s == pytest.approx(2 / 10)
    assert point.goodput_share == pytest.approx(2 / 4)
    assert point.tokens_per_chunk == pytest.approx(11 / 7)
    values = point.to_json()
    assert {
        "concurrency",
        "tokens_per_s",
        "per_user_tokens_per_s",
        "ttft_ms",
        "itl_ms",
        "errors",
    } <= (set(values))
    assert (values["concurrency"], values["rate"]) == (2, None)


@pytest.mark.parametrize(("factor", "is_doubtful"), [(1, False), (2, True)])
def test_usage_that_is_not_that_of_the_text_is_told(factor: int, is_doubtful: bool) -> None:
    """UC-152: the texts are counted again, word by word here; an end token more is no doubt."""
    words = "so many words that an end token is lost among them all"
    calls = [
        replace(streamed(1.0, len(words), tokens=factor * (12 + 1)), text=words) for _ in range(2)
    ]
    crowd = Crowd(calls=[*calls, broken(2.0, "timeout")], start_s=0.0, end_s=10.0)
    point = point_of(TWO, crowd, CONFIG, count_tokens=lambda text: len(text.split()))
    assert point.usage_ratio == pytest.approx(factor * 13 / 12)
    assert (point.doubt is not None) is is_doubtful
    text = io.StringIO()
    print_serve(Console(file=text, width=200), report_of([point]))
    assert ("usage counts 2.17 times the tokens of the texts" in text.getvalue()) is is_doubtful
    assert point_of(TWO, crowd, CONFIG).usage_ratio is None


def test_what_the_bench_broke_off_counts_by_its_text() -> None:
    cut = streamed(1.0, 8, tokens=0)
    cut = Call(**{**{n: getattr(cut, n) for n in cut.__slots__}, "fault": ABANDONED})
    calls = [streamed(0.0, 4, 4, tokens=4), cut]
    point = point_of(TWO, Crowd(calls=calls, start_s=0.0, end_s=1.0), CONFIG)
    assert point.tokens_per_s == pytest.approx(4.0)
    point = point_of(TWO, Crowd(calls=calls, start_s=0.0, end_s=2.0), CONFIG)
    assert point.tokens_per_s == pytest.approx((4.0 + 4.0) / 2.0)


def test_a_load_that_failed_has_no_figures() -> None:
    """UC-154: errors are never slow answers."""
    crowd = Crowd(calls=[broken(1.0, "HTTP 500")], start_s=0.0, end_s=10.0)
    point = point_of(TWO, crowd, CONFIG)
    assert point.has_failed
    assert point.ttft_ms is point.goodput_per_s is None
    text = io.StringIO()
    print_serve(Console(file=text, width=200), report_of([point]))
    assert "FAILED" in text.getvalue()
    assert "1 times HTTP 500" in text.getvalue()


def report_of(points: list[Any]) -> ServeReport:
    return ServeReport(url="u", model="m", num_prompts=3, config=CONFIG, points=points)


def test_points_are_kept_and_failed_ones_measured_again(tmp_path: Path) -> None:
    crowds = {
        1.0: Crowd(calls=[streamed(1.0, 4, 4, tokens=3)], start_s=0.0, end_s=10.0),
        2.0: Crowd(calls=[broken(1.0, "timeout")], start_s=0.0, end_s=10.0),
    }
    config = ServeBenchConfig(concurrency=[1], rates=[2.0], seconds=10.0)
    asked: list[float] = []

    def counted(load: Load) -> Crowd:
        asked.append(load.level)
        return crowds[load.level]

    path = tmp_path / "points.jsonl"
    for _ in range(2):
        points = measure_all(config, counted, file=PointsFile(path, settings=config.settings()))
    assert asked == [1.0, 2.0, 2.0]
    assert [point.has_failed for point in points] == [False, True]
    other = ServeBenchConfig(concurrency=[1], seconds=9.0)
    with pytest.raises(InputError, match="seconds"):
        PointsFile(path, settings=other.settings())
    save_frontier(report_of(points), tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


class Quick:
    """A server whose answers are three chunks of two tokens each; it sleeps a little."""

    def __init__(self, *, has_usage: bool = True, fails: bool = False) -> None:
        self.has_usage, self.fails = has_usage, fails
        self.bodies: list[Mapping[str, Any]] = []
        self.most = self.now = 0
        self.lock = threading.Lock()

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        with self.lock:
            self.bodies.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.fails:
                raise ServerFault("HTTP 503", "busy")
            for text in ("", "ab", "cd", "ef"):
                time.sleep(0.001)
                data = {"choices": [{"delta": {"role": "assistant", "content": text}}]}
                yield Event(at_s=time.perf_counter(), data=data)
            usage = {"completion_tokens": 6, "prompt_tokens": 3}
            last = {"choices": [], "usage": usage if self.has_usage else None}
            yield Event(at_s=time.perf_counter(), data=last)
        finally:
            with self.lock:
                self.now -= 1


SHORT = ServeBenchConfig(seconds=0.2, warmup_seconds=0.02, timeout_seconds=5.0)


def test_a_closed_load_keeps_its_users_and_its_prompts_in_order() -> None:
    server = Quick()
    crowd = measure(server, model="m", chats=CHATS, load=TWO, config=SHORT)
    assert server.most == 2
    assert server.now == 0
    point = point_of(TWO, crowd, SHORT)
    assert point.errors == 0
    assert point.tokens_per_chunk == pytest.approx(2.0)
    first = server.bodies[0]
    assert first["stream_options"] == {"include_usage": True}
    assert {body["messages"][0]["content"] for body in server.bodies[:3]} == {
        chat[0]["content"] for chat in CHATS
    }
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)
    for body in server.bodies:  # UC-151: real text, and answers end where the model ends them
        assert not {"ignore_eos", "min_tokens", "stop_token_ids"} & body.keys()
        assert list(body["messages"]) in CHATS


def test_an_open_load_sends_whoever_is_still_waiting() -> None:
    server = Quick()
    load = Load(kind=LoadKind.OPEN, level=200.0)
    crowd = measure(server, model="m", chats=CHATS, load=load, config=SHORT)
    point = point_of(load, crowd, SHORT)
    assert point.num_requests > 5
    assert point.errors == 0
    assert (point.concurrency, point.to_json()["rate"]) == (None, 200.0)


@pytest.mark.parametrize(
    ("server", "name"), [(Quick(fails=True), "HTTP 503"), (Quick(has_usage=False), NO_USAGE)]
)
def test_errors_are_named(server: Quick, name: str) -> None:
    crowd = measure(server, model="m", chats=CHATS, load=TWO, config=SHORT)
    point = point_of(TWO, crowd, SHORT)
    assert point.has_failed
    assert set(point.error_names) == {name}


@contextmanager
def streaming(*lines: str, status: int = 200) -> Iterator[str]:
    """A server that sends these lines as a chunked stream."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for line in lines:
                data = f"{line}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunk(text: str, **more: Any) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}], **more})


USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 7, "prompt_tokens": 2}}'


def test_a_stream_is_read_over_http() -> None:
    with streaming(": comment", chunk("ab"), chunk("c"), USAGE, "data: [DONE]") as url:
        found = call(HttpApi(url=url, timeout_s=5), {"model": "m"})
    assert found.fault is None
    assert (found.num_tokens, [size for _, size in found.arrivals]) == (7, [2, 1])
    assert found.text == "abc"


@pytest.mark.parametrize(
    ("lines", "status", "fault"),
    [
        ((chunk("ab"),), 200, "cut stream"),
        ((chunk("ab"), 'data: {"error": {"message": "lost"}}'), 200, "error in stream"),
        (("data: {",), 200, "not JSON"),
        ((chunk("ab"), "data: [DONE]"), 200, NO_USAGE),
        ((USAGE, "data: [DONE]"), 200, "empty answer"),
        (("no room",), 429, "HTTP 429"),
    ],
)
def test_every_broken_stream_has_a_name(lines: tuple[str, ...], status: int, fault: str) -> None:
    with streaming(*lines, status=status) as url:
        assert call(HttpApi(url=url, timeout_s=5), {"model": "m"}).fault == fault


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"concurrency": [0]}, "concurrency is"),
        ({"concurrency": []}, "needs a load"),
        ({"sla_ttft_ms": 0.0}, "sla_ttft_ms is"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ServeBenchConfig(**values)
