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
        (("prepare", "p.jsonl", "--out", "a", "--seed", -1), "seed is -1, but it must lie in"),
        (("train", "--dry-run", "--tera-flops", 0), "tera_flops is 0.0, but it must be above"),
        (("train", "--dry-run", "--tera-flops", "nan"), "tera_flops is nan, but it must be"),
        (("bench", "load", "--record", "p.jsonl"), "p.jsonl is there and holds no recorded"),
        (("prepare", "p.jsonl", "--out", "a", "--token-ids"), "give one by --endpoint"),
        (("generate", "hello", "--min-tokens", 9, "--max-tokens", 3), "min_tokens is 9, but it"),
        (("generate", "hello", "--threads", 0), "threads is 0, but it must lie in 1.."),
        (("demo", "--prompts", 99), "prompts is 99, but the demo has between 1 and 15"),
        (("demo", "--temperature", -1), "temperature is -1.0, but"),
        (("demo", "--seed", -1), "seed is -1, but it must lie in [0, 2^63)"),
        (("evaluate", "p.jsonl", "--seed", -1), "seed is -1, but"),
        (("evaluate", "p.jsonl", "--tasks", ","), "tasks is empty; name some, or leave --tasks"),
        (("evaluate", "p.jsonl", "--drafter", "gone"), "gone/config.json does not exist"),
        (("evaluate", "p.jsonl", "--drafter", "none"), "drafter is 'none', but this command is"),
        (("evaluate", "p.jsonl"), "No drafter is shipped for target 'nothing.gguf'"),
        (("profile", "--drafter", "none"), "drafter is 'none', but this command is"),
        (("profile",), "No drafter is shipped for target 'nothing.gguf'"),
        (("calibrate", "p.jsonl", "--seed", -1), "seed is -1, but"),
        (("bench", "exact", "p.jsonl", "--seed", -1), "seed is -1, but"),
        (("bench", "exact", "p.jsonl", "--drafter", "none"), "drafter is 'none', but this"),
        (("bench", "prefix", "--temperature", -1), "temperature is -1.0, but"),
        (("bench", "prefix", "--seed", -1), "seed is -1, but"),
        (("bench", "load", "--seed", -1), "seed is -1, but"),
        (("bench", "load", "--unit-seconds", "nan"), "unit_s is nan, but it must be above 0"),
        (("bench", "load", "--temperatures", "1,1"), "each may stand there once"),
        (("bench", "load", "--temperatures", ""), "temperatures is empty; name one"),
        (("bench", "load", "--concurrency", ""), "give --concurrency or --rates"),
        (("bench", "load", "--policies", "hope"), "policy is 'hope', but it must be auto"),
        (("bench", "load", "gone.jsonl"), "gone.jsonl is not a file"),
        (("bench", "load", "--drafter", "none"), "drafter is 'none', but this command is"),
        (("bench", "overhead", "--seed", -1), "seed is -1, but"),
        (("bench", "single", "--policy", "hope"), "policy is 'hope', but it must be auto"),
        (("bench", "single", "--drafter", "gone"), "gone/config.json does not exist"),
        (("bench", "single", "--threads", 10**6), "num_threads is 1000000, but it must lie in"),
        (("bench", "step", "--context", 0), "context is 0, but it must be at least 1"),
        (("bench", "cycle", "--steps", 0), "steps is 0, but it must be at least 1"),
        (("bench", "train", "--repeats", -1), "repeats is -1, but it must be at least 1"),
        (("bench", "train", "--threads", 10**6), "threads is 1000000, but it must lie in 1.."),
    ],
)
def test_a_value_that_cannot_be_is_named_before_anything_is_loaded(
    run: Run, there: Path, command: Sequence[object], words: str
) -> None:
    done = run(*command, *SIMPLE)
    assert done.code == 1
    assert words in done.err
    assert done.err.count("\n") == 1


def test_training_into_the_directory_of_a_model_is_refused_before_the_work(
    run: Run, there: Path, model_dir: Path
) -> None:
    before = {path.name: path.read_bytes() for path in model_dir.iterdir()}
    done = run("train", "p.jsonl", "--steps", 1, "--out", model_dir, *SIMPLE)
    assert done.code == 1
    assert f"{model_dir} holds a model that is no drafter" in done.complaint()
    assert {path.name: path.read_bytes() for path in model_dir.iterdir()} == before


CLIENTS = (("audit",), ("bench", "serve"), ("bench", "soak"))


@pytest.mark.parametrize(
    "url",
    ["", "localhost:1", "ftp://localhost/v1", "http://a b/v1", "http://[::1/v1", "http://a:99999"],
)
def test_what_is_no_base_of_a_server_is_named(run: Run, there: Path, url: str) -> None:
    """Some of these ended in a traceback of the library that parses addresses."""
    commands = [(*command, "--url") for command in CLIENTS]
    for command in (*commands, ("prepare", "p.jsonl", "--out", "a", "--endpoint")):
        done = run(*command, url)
        assert done.code == 1, command
        assert f"is {url!r}, but it must be a base such as http://" in done.complaint()


@pytest.mark.parametrize("command", CLIENTS, ids=str)
def test_a_key_file_that_holds_no_text_is_named(
    run: Run, there: Path, command: Sequence[object]
) -> None:
    (there / "key").write_bytes(bytes(range(128, 256)))
    for name, words in (("key", "holds no text"), ("gone", "not exist"), ("folder", "directory")):
        done = run(*command, "--url", "http://localhost:1/v1", "--api-key-file", name)
        assert done.code == 1
        assert f"{name} " in done.complaint()
        assert words in done.complaint()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("bench", "serve", "--seconds", "nan"), "seconds is nan, but it must be above 0"),
        (("bench", "serve", "--warmup-seconds", "nan"), "warmup_seconds is nan, but"),
        (("bench", "serve", "--seed", -1), "seed is -1, but"),
        (("bench", "soak", "--minutes", "nan"), "minutes is nan, but it must be above 0"),
        (("bench", "soak", "--seed", -1), "seed is -1, but"),
        (("audit", "--max-noise", "nan"), "max_noise is nan, but"),
        (("audit", "--seed", -1), "seed is -1, but"),
    ],
)
def test_a_value_that_cannot_be_is_named_before_a_server_is_asked(
    run: Run, there: Path, command: Sequence[object], words: str
) -> None:
    done = run(*command, "--url", "http://localhost:1/v1")
    assert done.code == 1
    assert words in done.complaint()


def test_the_remedy_for_an_unknown_column_is_told_where_there_is_one(run: Run, there: Path) -> None:
    (there / "q.jsonl").write_text('{"question": "why?"}\n')
    done = run("prepare", "q.jsonl", "--out", "a", *SIMPLE)
    assert done.code == 1
    assert "tell by --column which one it is, as in prompt=question" in done.complaint()
    done = run("evaluate", "q.jsonl", "--drafter", "prompt-lookup", *SIMPLE)
    assert "each row needs turns, messages, conversations or prompt." in done.complaint()


@pytest.mark.parametrize(
    ("name", "words"),
    [("gone", "gone does not exist; give"), ("folder", "is a directory"), ("b", "holds no text")],
)
def test_a_record_that_cannot_be_read_is_named(
    run: Run, there: Path, name: str, words: str
) -> None:
    (there / "b").write_bytes(bytes(range(128, 256)))
    done = run("simulate", name, "--cost", "p.jsonl")
    assert done.code == 1
    assert words in done.complaint()


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
