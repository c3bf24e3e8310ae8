"""Answers over HTTP: a real server on this machine, with the faults that servers have."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark.data.answers import AnswerFile, AnswerSettings, Sampling, read_answers
from dspark.data.endpoints import EndpointConfig, Endpoints, RequestOptions
from dspark.data.preparation import PrepareReport, prepare
from dspark.data.prompts import Prompt
from dspark.errors import CapacityError, InputError
from dspark.text.answer_span import AnswerSpan
from dspark.text.tokenizer import Tokenizer
from tests.toy_text import save_byte_level

SAMPLINGS = [Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)]
OPTIONS = RequestOptions(max_new_tokens=9, seed=100, thinking=None)
Reply = tuple[int, bytes]
Respond = Callable[[Mapping[str, Any], int], Reply]
"""What the server says to a request that it sees for the n-th time."""


@dataclass(slots=True)
class Server:
    """A chat server that remembers its requests."""

    respond: Respond
    url: str = ""
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: Mapping[str, Any], key: str | None) -> Reply:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.bodies.append(body)
            self.keys.append(key)
            seen = sum(other == body for other in self.bodies)
        try:
            return self.respond(body, seen)
        finally:
            with self._lock:
                self._at_once -= 1


@pytest.fixture
def serve() -> Iterator[Callable[[Respond], Server]]:
    running = []

    def start(respond: Respond) -> Server:
        server = Server(respond)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, data = server.reply(body, self.headers.get("Authorization"))
                if status == 0:  # the connection breaks off
                    self.connection.close()
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(data) + (status == 299)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{http.server_port}/v1"
        running.append(http)
        return server

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_level(path)
    return Tokenizer.load(path)


def good(body: Mapping[str, Any], _seen: int) -> Reply:
    """Says its last user turn again; cut where the question says so."""
    said = body["messages"][-1]["content"]
    reason = "length" if "long" in said else "stop"
    message = {"role": "assistant", "content": f"{said}, yes"}
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()


def prompts(*turns: str) -> list[Prompt]:
    return [
        Prompt(id=f"p{number}", domain="chat", system=None, turns=turn.split("|"))
        for number, turn in enumerate(turns)
    ]


def run(
    path: Path,
    asked: list[Prompt],
    *servers: Server,
    tokenizer: Tokenizer,
    options: RequestOptions = OPTIONS,
    **config: Any,
) -> PrepareReport:
    values = {"concurrency": 2, "retries": 3, "backoff_s": 0.0, "timeout_s": 20.0, **config}
    endpoint = EndpointConfig(urls=[server.url for server in servers], model="toy", **values)
    span = None if endpoint.has_token_ids else AnswerSpan(tokenizer)
    settings = AnswerSettings(
        target="toy",
        engine="endpoint toy",
        template_hash=tokenizer.template_hash,
        thinking=None,
        system=None,
        samplings=SAMPLINGS,
        max_new_tokens=9,
        seed=100,
    )
    return prepare(
        asked,
        AnswerFile(path, settings=settings),
        answerer=Endpoints(endpoint, options=options, span=span),
        samplings=SAMPLINGS,
    )


def test_requests_carry_conversation_and_sampling_and_answers_their_ids(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    server = serve(good)
    options = RequestOptions(max_new_tokens=9, seed=100, thinking=False)
    key = {"api_key": "secret"}
    asked = prompts("one|two", "a long one")
    report = run(tmp_path / "a", asked, server, tokenizer=tokenizer, options=options, **key)
    assert (report.num_answered, report.num_truncated, report.failures) == (3, 1, [])
    first = next(body for body in server.bodies if len(body["messages"]) == 3)
    assert first == {
        "model": "toy",
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "one, yes"},
            {"role": "user", "content": "two"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 9,
        "seed": 100,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert set(server.keys) == {"Bearer secret"}
    answers = {answer.id: answer for answer in read_answers(tmp_path / "a")}
    assert set(answers) == {"p0", "p0/2", "p1"}
    for answer in answers.values():
        end = "" if answer.is_truncated else "<|stop|>"
        assert tokenizer.decode(answer.token_ids, keep_special=True) == answer.text + end
    assert answers["p0"].prompt_token_ids == tokenizer.chat([{"role": "user", "content": "one"}])
    assert answers["p1"].is_truncated
    assert (answers["p0/2"].turn, answers["p0/2"].conversation) == (1, "p0")


FAULTS: dict[str, Reply] = {
    "busy": (429, b"slow down"),
    "broken": (500, b"oops"),
    "reset": (0, b""),
    "cut": (299, b'{"choices": ['),  # says one byte more than it sends
    "no json": (200, b"<html>"),
    "no choices": (200, b"{}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_tried_again_and_each_row_comes_once(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path, fault: str
) -> None:
    def flaky(body: Mapping[str, Any], seen: int) -> Reply:
        is_hit = body["messages"][-1]["content"] in ("q1", "q3") and seen <= 2
        return FAULTS[fault] if is_hit else good(body, seen)

    server = serve(flaky)
    asked = prompts(*(f"q{n}" for n in range(5)))
    report = run(tmp_path / "a", asked, server, tokenizer=tokenizer)
    assert report.failures == []
    tries = Counter(body["messages"][-1]["content"] for body in server.bodies)
    assert tries == {"q0": 1, "q1": 3, "q2": 1, "q3": 3, "q4": 1}
    ids = [answer.id for answer in read_answers(tmp_path / "a")]
    assert sorted(ids) == ["p0", "p1", "p2", "p3", "p4"]
    assert 1 <= server.most_at_once <= 2


def test_a_fault_that_lasts_is_named_not_repeated_and_asked_by_the_next_run(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def picky(body: Mapping[str, Any], seen: int) -> Reply:
        said = body["messages"][-1]["content"]
        message: dict[str, Any] = {"content": "" if said == "silent" else None}
        if said == "wrong":
            return 400, b"context too long"
        if said == "down":
            return 503, b"no worker"
        if said == "silent":
            choices = [{"message": message, "finish_reason": "stop"}]
            return 200, json.dumps({"choices": choices}).encode()
        if said == "filtered":
            choices = [{"message": {"content": "x"}, "finish_reason": "content_filter"}]
            return 200, json.dumps({"choices": choices}).encode()
        return good(body, seen)

    server = serve(picky)
    asked = prompts("fine", "wrong", "down", "silent", "filtered", "fine too")
    report = run(tmp_path / "a", asked, server, tokenizer=tokenizer)
    reasons = dict(report.failures)
    assert reasons["p1"] == "HTTP 400: context too long"
    assert "HTTP 503: no worker (4 tries)" in reasons["p2"]
    assert reasons["p3"] == "the answer has no text"
    assert reasons["p4"] == "the answer ended with 'content_filter'"
    assert sum(body["messages"][-1]["content"] == "wrong" for body in server.bodies) == 1
    server.respond = good
    again = run(tmp_path / "a", asked, server, tokenizer=tokenizer)
    assert (again.num_done_before, again.num_answered, again.failures) == (2, 4, [])
    assert len(read_answers(tmp_path / "a")) == 6


def test_several_servers_share_the_work_and_stand_in_for_each_other(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    well, ill, gone = serve(good), serve(lambda *_: (502, b"")), serve(good)
    gone.url = "http://127.0.0.1:9/v1"  # nothing listens there
    asked = prompts(*(f"q{n}" for n in range(9)))
    report = run(tmp_path / "a", asked, well, ill, gone, tokenizer=tokenizer)
    assert (report.num_answered, report.failures) == (9, [])
    assert len(well.bodies) == 9
    assert ill.bodies


def test_nothing_but_failures_ends_the_run_and_keeps_what_there_was(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def dying(body: Mapping[str, Any], seen: int) -> Reply:
        return good(body, seen) if body["seed"] < 103 else (401, b"no key")

    server = serve(dying)
    asked = prompts(*(f"q{n}" for n in range(40)))
    with pytest.raises(CapacityError, match=r"10 requests in a row failed.*HTTP 401: no key"):
        run(tmp_path / "a", asked, server, tokenizer=tokenizer)
    assert len(server.bodies) < 20
    assert len(read_answers(tmp_path / "a")) == 3


def test_ids_that_the_server_generated_are_kept(
    serve: Callable[[Respond], Server], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """UC-103: other ids of the same text; where the server sends none, the turn fails."""

    def with_ids(body: Mapping[str, Any], seen: int) -> Reply:
        assert body["return_token_ids"] is True
        found = json.loads(good(body, seen)[1])
        if body["messages"][-1]["content"] == "one":
            found["prompt_token_ids"] = [7, 8]
            found["choices"][0]["token_ids"] = [9, 1]
        return 200, json.dumps(found).encode()

    report = run(
        *(tmp_path / "a", prompts("one", "two"), serve(with_ids)),
        tokenizer=tokenizer,
        has_token_ids=True,
    )
    (answer,) = read_answers(tmp_path / "a")
    assert (answer.prompt_token_ids, answer.token_ids) == ([7, 8], [9, 1])
    assert report.failures == [("p1", "the server returned no token ids")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"urls": ["localhost:8000"]}, "must be a base such as"),
        ({"urls": []}, "endpoint is empty"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"retries": -1}, "retries is -1"),
    ],
)
def test_values_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EndpointConfig(**{"urls": ["http://x/v1"], "model": "toy", **changes})
