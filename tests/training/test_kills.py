"""Kill -9 at ten random moments of filling a cache and at ten of training (UC-118, UC-121)."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.data.states_cache import StatesCache
from dspark.training import snapshot
from tests.training import killed_runs
from tests.training.children import exit_codes


def in_child(run: Callable[[Path, int | None], None], folder: Path, die_at: int | None) -> int:
    """Exit code of a process that runs it."""
    (code,) = exit_codes(run, [(folder, die_at)])
    assert code is not None
    return code


def kill_often(run: Callable[[Path, int | None], None], folder: Path, *, num_events: int) -> None:
    """Ten processes end at random events, most of them killed; the eleventh ends by itself."""
    moments = random.Random(7)
    codes = [in_child(run, folder, moments.randint(1, num_events // 6)) for _ in range(10)]
    assert set(codes) <= {-9, 0}
    assert codes.count(-9) >= 8
    assert in_child(run, folder, None) == 0


@pytest.mark.slow
def test_a_cache_killed_ten_times_holds_each_answer_once_and_bit_for_bit(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert in_child(killed_runs.fill, whole, None) == 0
    num_events = int((whole / "events").read_text())
    kill_often(killed_runs.fill, killed, num_events=num_events)
    expected, found = StatesCache(whole / "states"), StatesCache(killed / "states")
    lines = (killed / "states" / "index.jsonl").read_text().splitlines()
    ids = [json.loads(line)["id"] for line in lines]
    assert ids == [answer.id for answer in killed_runs.ANSWERS]
    assert found.damaged() == []
    for name in ("rows.bin", "lse.bin"):
        one, other = (folder / "states" / name for folder in (whole, killed))
        assert one.read_bytes() == other.read_bytes()
    assert found.mass().tolist() == expected.mass().tolist()


@pytest.mark.slow
def test_a_training_killed_ten_times_repeats_the_uninterrupted_curve(tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    assert in_child(killed_runs.fill, whole, None) == 0
    shutil.copytree(whole, killed)
    assert in_child(killed_runs.train, whole, None) == 0
    num_events = int((whole / "events").read_text())
    kill_often(killed_runs.train, killed, num_events=num_events)
    straight = dict(json.loads(line) for line in (whole / "losses").read_text().splitlines())
    seen = [json.loads(line) for line in (killed / "losses").read_text().splitlines()]
    assert len(straight) == 24
    assert len(seen) > 24  # steps behind a checkpoint ran again
    assert {step for step, _ in seen} == set(straight)
    assert all(loss == straight[step] for step, loss in seen)
    one, other = (snapshot.read_snapshot(f / "run" / "best.pt") for f in (whole, killed))
    assert one["tau"] == other["tau"]
    assert all(
        bool((one["masters"][name] == other["masters"][name]).all()) for name in one["masters"]
    )
