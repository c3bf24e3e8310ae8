"""What the machine says of itself."""

from pathlib import Path

import pytest
import torch

from dspark import machine


def test_free_memory_is_within_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    left = machine._left_in_group(tmp_path)
    assert left == 450  # pages of files can be given back
    monkeypatch.setattr(machine, "_left_in_group", lambda: left)
    assert machine.free_memory(torch.device("cpu")) == 450


@pytest.mark.parametrize("limit", ["max", ""])
def test_no_limit_is_no_answer(tmp_path: Path, limit: str) -> None:
    assert machine._left_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text(limit)
    assert machine._left_in_group(tmp_path) is None


@pytest.mark.parametrize(
    ("limit", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", None)]
)
def test_processors_are_within_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int | None
) -> None:
    """Threads beyond it are put to sleep in the middle of a step, and the others spin."""
    assert machine._group_processors(tmp_path) is None
    (tmp_path / "cpu.max").write_text(limit + "\n")
    assert machine._group_processors(tmp_path) == expected
    monkeypatch.setattr(machine, "_group_processors", lambda: 1)
    assert machine.num_processors() == 1


def test_a_device_that_does_not_say_is_not_guessed() -> None:
    assert machine.free_memory(torch.device("meta")) is None
