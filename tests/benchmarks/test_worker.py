"""The process that runs an engine, driven with a small program in place of an engine's own."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dspark.benchmarks import worker
from dspark.benchmarks.worker import Worker
from dspark.errors import ModelError

_PROGRAM = """
import json, os, sys
settings = json.loads(sys.argv[1])
if settings.get("dies"):
    sys.exit("something broke")
print(json.dumps(settings.get("first", {"version": "1"})), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if settings.get("dies_later"):
        os._exit(7)
    count = task["num_tokens"] + settings.get("extra", 0)
    ids = [prompt[:1] * count for prompt in task["prompts"]]
    print(json.dumps({"seconds": 0.5, "token_ids": ids}), flush=True)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    monkeypatch.setattr(worker, "_SCRIPT", script)
    started: list[Worker] = []

    def call(settings: Mapping[str, object]) -> Worker:
        started.append(Worker("toy", Path(sys.executable), {"num_threads": 1, **settings}))
        return started[-1]

    yield call
    for one in started:
        one.__exit__()


def test_an_answer_has_the_asked_number_of_tokens_for_each_prompt(start) -> None:
    toy = start({})
    assert toy.wait_until_ready() == "1"
    sample = toy.answer([[4, 5], [6]], 3)
    assert sample.token_ids == [[4, 4, 4], [6, 6, 6]]
    assert sample.tokens_per_s == 12.0


def test_a_waiting_engine_is_frozen_and_ends_with_its_owner(start) -> None:
    toy = start({})
    toy.wait_until_ready()
    for _ in range(2):
        toy.answer([[1]], 2)
        found = os.waitid(os.P_PID, toy._process.pid, os.WSTOPPED)
        assert found is not None
        assert found.si_status == signal.SIGSTOP
    toy.__exit__()
    assert toy._process.returncode == 0


def test_an_engine_that_dies_gives_an_error_and_its_own_words(
    start, capsys: pytest.CaptureFixture[str]
) -> None:
    """UC-154: a crash is not a slow run."""
    with pytest.raises(ModelError, match=r"Engine toy failed \(exit code 1\)"):
        start({"dies": True}).wait_until_ready()
    assert "something broke" in capsys.readouterr().err


def test_an_engine_that_dies_at_work_gives_an_error(start) -> None:
    toy = start({"dies_later": True})
    toy.wait_until_ready()
    with pytest.raises(ModelError, match=r"exit code 7"):
        toy.answer([[1]], 2)


def test_an_engine_that_refuses_says_why(start) -> None:
    with pytest.raises(ModelError, match="toy did not start: no such drafter"):
        start({"first": {"error": "no such drafter"}}).wait_until_ready()


def test_another_number_of_tokens_is_no_figure(start) -> None:
    toy = start({"extra": 1})
    toy.wait_until_ready()
    with pytest.raises(ModelError, match=r"gave \[3\] tokens instead of 2"):
        toy.answer([[1]], 2)
