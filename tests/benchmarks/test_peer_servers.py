"""Servers as processes: started on a free port, waited for, ended; and what is said where not."""

import sys
from pathlib import Path

import pytest

from dspark.benchmarks import peer_servers
from dspark.benchmarks.http_api import first_model
from dspark.benchmarks.peer_servers import OURS, ServerCall, check_names, ours, peer, running
from dspark.errors import InputError, ModelError

_TOY = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        self.answer({"data": [{"id": "toy"}]})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": []})
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_server_runs_for_its_turn() -> None:
    call = ServerCall(name="toy", command=[sys.executable, "-c", _TOY])
    with running(call) as api:
        assert first_model(api) == "toy"
    with pytest.raises(Exception, match="refused"):
        first_model(api)


def test_a_server_that_dies_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    call = ServerCall(name="toy", command=[sys.executable, "-c", "print('no room')"])
    with pytest.raises(ModelError, match="toy did not start"), running(call):
        pass
    assert "no room" in capfd.readouterr().err


def test_a_peer_that_is_not_installed_is_none(tmp_path: Path) -> None:
    for name in peer_servers.SERVERS:
        assert peer(name, "smollm2-135m", num_users=4, threads=2, folder=tmp_path) is None
    with pytest.raises(InputError, match="'ollama'"):
        check_names(["ollama"])


def test_ours_is_started_for_all_users() -> None:
    call = ours("toy", num_users=32, threads=2, options=["--policy", "none"])
    assert call.name == OURS
    assert call.command[-2:] == ["--policy", "none"]
    assert call.command[call.command.index("--max-requests") + 1] == "32"
