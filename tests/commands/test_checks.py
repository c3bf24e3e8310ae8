"""What cannot be is said before anything is loaded: here the model is missing too."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark.errors import InputError
from dspark.machine import num_processors
from tests.command_line import Run

SIMPLE = ("--target", "nothing.gguf")


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of prompts, `p.jsonl`, and a directory, `folder`."""
    (tmp_path / "p.jsonl").write_text('{"id": "a", "domain": "m", "turns": ["hello"]}\n')
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = [
    ("prepare", "p.jsonl", "--out"),
    ("evaluate", "p.jsonl", "--results"),
    ("profile", "--out"),
    ("bench", "load", "p.jsonl", "--results"),
    ("bench", "load", "p.jsonl", "--record"),
    ("bench", "serve", "--url", "http://localhost:1/v1", "--results"),
    ("bench", "serve", "--url", "http://localhost:1/v1", "--plot"),
]
FOLDERS = [
    ("train", "p.jsonl", "--steps", 1, "--out"),
    ("train", "p.jsonl", "--steps", 1, "--out", "new", "--work"),
    ("train", "p.jsonl", "--steps", 1, "--out", "new", "--tensorboard"),
    ("evaluate", "p.jsonl", "--plots"),
    ("calibrate", "p.jsonl", "--plots"),
    ("bench", "load", "p.jsonl", "--plots"),
    ("bench", "servers", "--results"),
]


@pytest.mark.parametrize("command", FILES, ids=str)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    run: Run, there: Path, command: Sequence[object]
) -> None:
    target = () if command[:2] == ("bench", "serve") else SIMPLE
    for place, words in (
        ("folder", "folder is a directory, but a file is to be written"),
        ("p.jsonl/x", "p.jsonl is a file, so p.jsonl/x cannot lie in it"),
        ("/dev/null", "/dev/null is no regular file"),  # a rename would take its place
    ):
        done = run(*command, place, *target)
        assert done.code == 1
        assert words in done.err
        assert done.err.count("\n") == 1
    assert {path.name for path in there.iterdir()} == {"p.jsonl", "folder"}


@pytest.mark.parametrize("command", FOLDERS, ids=str)
def test_a_directory_that_cannot_be_written_is_refused_before_the_work(
    run: Run, there: Path, command: Sequence[object]
) -> None:
    for place, words in (
        ("p.jsonl", "p.jsonl is a file, but a directory is to be written"),
        ("p.jsonl/x/y", "p.jsonl is a file, so p.jsonl/x/y cannot lie in it"),
    ):
        done = run(*command, place, *SIMPLE)
        assert done.code == 1
        assert words in done.err
        assert done.err.count("\n") == 1
    assert {path.name for path in there.iterdir()} == {"p.jsonl", "folder"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("evaluate", "p.jsonl", "--limit", 0), "limit is 0, but it must be at least 1"),
        (("calibrate", "p.jsonl", "--limit", -2), "limit is -2, but it must be at least 1"),
        (("bench", "exact", "p.jsonl", "--limit", 0), "limit is 0, but"),
        (("bench", "load", "p.jsonl", "--limit", 0), "limit is 0, but"),
        (("bench", "load", "p.jsonl", "--rates", "nan"), "rates holds 'nan', but it must hold"),
        (("bench", "exact", "p.jsonl", "--temperatures", ""), "temperatures is empty, which would"),
        (("bench", "exact", "p.jsonl", "--batches", ","), "batches is empty, which would prove"),
        (("prepare", "p.jsonl", "--out", "a", "--minutes", "nan"), "minutes is nan, but it must"),
        (("prepare", "p.jsonl", "--out", "a", "--minutes", 0), "minutes is 0.0, but it must"),
        (("prepare", "p.jsonl", "--out", "a", "--max-new-tokens", 0), "max_new_tokens is 0, but"),
        (("prepare", "p.jsonl", "--out", "a", "--concurrency", 0), "concurrency is 0, but"),
        (("prepare", "p.jsonl", "--out", "a", "--model", "m"), "model is m, but no server is"),
        (("prepare", "p.jsonl", "--out", "a", "--token-ids"), "give one by --endpoint"),
        (("generate", "hello", "--min-tokens", 9, "--max-tokens", 3), "min_tokens is 9, but it"),
        (("generate", "hello", "--threads", 0), "threads is 0, but it must lie in 1.."),
    ],
)
def test_a_value_that_cannot_be_is_named_before_anything_is_loaded(
    run: Run, there: Path, command: Sequence[object], words: str
) -> None:
    done = run(*command, *SIMPLE)
    assert done.code == 1
    assert words in done.err
    assert done.err.count("\n") == 1


def test_more_threads_than_processors_are_refused(run: Run, there: Path) -> None:
    """A hundred thousand ended the process; three on two processors took minutes for 20 tokens."""
    done = run("generate", "hello", *SIMPLE, "--threads", num_processors() + 1)
    assert done.code == 1
    assert f"must lie in 1..{num_processors()}" in done.err


def test_a_simulation_without_a_load_is_refused(run: Run, there: Path) -> None:
    from dspark.commands.shared import numbers_in

    with pytest.raises(InputError, match="rates holds 'inf', but it must hold finite numbers"):
        numbers_in("rates", "1,inf")


def test_a_file_that_fails_in_the_middle_of_the_work_is_named(
    run: Run, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the checks did not see: the file and the system's reason, and no traceback."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "table.json")

    monkeypatch.setattr("dspark.assembly.load_llm", full)
    done = run("generate", "hello")
    assert done.code == 1
    assert done.complaint() == "dspark: table.json cannot be used: No space left on device."
