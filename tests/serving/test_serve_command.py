"""`dspark serve` as a program: its one line, its log, its end; and what it refuses."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from dspark.cli import app
from dspark.errors import InputError


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The command sends log lines to an error output that a test closes."""
    loggers = [logging.getLogger(name) for name in ("dspark", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def refusal(*options: str) -> str:
    result = CliRunner().invoke(app, ["serve", *options])
    assert isinstance(result.exception, InputError), result.output
    return str(result.exception)


def test_bad_options_are_one_sentence_before_anything_is_loaded() -> None:
    assert "port is 70000" in refusal("nowhere", "--port", "70000")
    assert "max_waiting is -1" in refusal("nowhere", "--max-waiting", "-1")
    assert "deadline_s is 0.0" in refusal("nowhere", "--deadline", "0")
    assert "drain_s is -1.0" in refusal("nowhere", "--drain", "-1")
    assert "api_key" in refusal("nowhere", "--api-key", "é")
    assert "log-format is 'xml'" in refusal("nowhere", "--log-format", "xml")
    assert "log-level is 'loud'" in refusal("nowhere", "--log-level", "loud")
    assert "give --host" in refusal("nowhere", "--host", "203.0.113.7")


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"Port {port} of 127.0.0.1 is in use" in refusal("nowhere", "--port", str(port))


def test_it_says_what_it_serves_logs_in_json_and_ends_by_sigterm(
    model_dir: Path, drafter_dir: Path
) -> None:
    options = ["--drafter", str(drafter_dir), "--policy", "fixed:2", "--dtype", "fp32", "--eager"]
    more = ["--port", "0", "--log-format", "json", "--served-name", "toy", "--max-requests", "2"]
    with subprocess.Popen(
        [sys.executable, "-m", "dspark", "serve", str(model_dir), *options, *more],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSPARK_API_KEY": "sesame"},
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if line.startswith("http"))
        assert "answers as toy: fixed:2 policy" in said
        assert "2 at once" in said
        assert "sesame" not in said
        reply = httpx.post(
            f"{said.split()[0]}/completions",
            json={"prompt": "Hello", "max_tokens": 3},
            headers={"Authorization": "Bearer sesame", "X-Request-Id": "one"},
            timeout=30.0,
        )
        assert reply.status_code == 200
        process.send_signal(signal.SIGTERM)
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        assert process.wait() == 0
    found = {entry.get("request_id"): entry for entry in logged}["one"]
    assert found["status"] == 200
    assert found["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert any("signal 15" in entry["message"] for entry in logged)
