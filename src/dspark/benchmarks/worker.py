"""One engine in a process of its own, driven from here; frozen while it is not its turn.

A waiting engine must not slow the one that answers: thread pools of some engines spin for a while
after their work. It knows processes and their messages, nothing of engines.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dspark.errors import ModelError

_SCRIPT = Path(__file__).parent / "peer_process.py"
_SHOWN = 3000  # characters of a dead engine's own words
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed answer to prompts that ran together."""

    seconds: float
    token_ids: Sequence[Sequence[int]]
    """Of each prompt."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, the prompts' own time included."""
        return sum(len(ids) for ids in self.token_ids) / self.seconds


class Worker:
    """A process that answers prompts; use as a context manager.

    `python` runs `peer_process.py` with `settings`, whose `num_threads` also bounds the thread
    pools of its libraries.
    """

    def __init__(self, name: str, python: Path, settings: Mapping[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        # an environment of its own must not see our packages; ours may come from PYTHONPATH
        isolation = "-P" if python == Path(sys.executable) else "-I"
        threads = dict.fromkeys(_THREAD_VARIABLES, str(settings["num_threads"]))
        self._process = subprocess.Popen(
            [str(python), isolation, str(_SCRIPT), json.dumps(dict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **threads},
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def wait_until_ready(self) -> str:
        """Block until the engine has loaded; its version. Raises `ModelError` if it died."""
        return str(self._receive()["version"])

    def freeze(self) -> None:
        """Stop all its threads until the next answer."""
        self._signal(signal.SIGSTOP)

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Sample:
        """A timed answer of exactly `num_tokens` ids to each prompt, then frozen again.

        Raises `ModelError` for anything else.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        task = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead; reading says how
        reply = self._receive()
        sample = Sample(seconds=reply["seconds"], token_ids=reply["token_ids"])
        counts = [len(ids) for ids in sample.token_ids]
        if counts != [num_tokens] * len(prompts):
            raise ModelError(
                f"Engine {self.name} gave {counts} tokens instead of {num_tokens} for each of "
                f"{len(prompts)} prompts, so its speed is not comparable; no figure is reported."
            )
        self.freeze()
        return sample

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            print(self._log.read().decode(errors="replace")[-_SHOWN:], file=sys.stderr)
            raise ModelError(
                f"Engine {self.name} failed (exit code {code}); what it printed stands above, and "
                "no figure is reported."
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ModelError(f"Engine {self.name} did not start: {reply['error']}")
        return reply

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
