"""A directory is replaced whole or stays as it was."""

import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from dspark.errors import CapacityError, ModelError
from dspark.models.directory import replaced_directory

OURS = re.compile(r"weights|config")


def listing(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): file.read_text() for file in path.rglob("*") if file.is_file()
    }


@contextmanager
def small_disk(num_bytes: int):
    """No file of this process may grow beyond `num_bytes`: the kernel refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_directory_appears_with_its_missing_parents(tmp_path):
    with replaced_directory(tmp_path / "a/b", replaces=OURS) as new:
        (new / "weights").write_text("1")
        assert not (tmp_path / "a/b").exists()
    assert listing(tmp_path) == {"a/b/weights": "1"}


def test_other_files_of_the_old_directory_stay(tmp_path):
    """A model card, a calibration, a trainer's state beside the weights."""
    path = tmp_path / "drafter"
    (path / "state").mkdir(parents=True)
    for name, text in {"weights": "1", "config": "1", "card.md": "c", "state/s": "s"}.items():
        (path / name).write_text(text)
    with replaced_directory(path, replaces=OURS) as new:
        (new / "weights").write_text("2")
    assert listing(tmp_path) == {
        "drafter/weights": "2",
        "drafter/card.md": "c",
        "drafter/state/s": "s",
    }


@pytest.mark.parametrize("error", [ModelError("broken"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_directory_and_nothing_else(tmp_path, error):
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "weights").write_text("1")

    def interrupted(new: Path) -> None:
        (new / "weights").write_text("2")
        raise error

    with pytest.raises(type(error)), replaced_directory(path, replaces=OURS) as new:
        interrupted(new)
    assert listing(tmp_path) == {"drafter/weights": "1"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["drafter"]


def test_a_full_disk_is_one_sentence_and_changes_nothing(tmp_path):
    path = tmp_path / "drafter"
    path.mkdir()
    (path / "weights").write_text("1")
    with (
        small_disk(4096),
        pytest.raises(CapacityError, match="no room for"),
        replaced_directory(path, replaces=OURS) as new,
    ):
        (new / "weights").write_text("2" * 10000)
    assert listing(tmp_path) == {"drafter/weights": "1"}


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "drafter").write_text("mine")
    with (
        pytest.raises(ModelError, match="is a file"),
        replaced_directory(tmp_path / "drafter", replaces=OURS),
    ):
        pass
    with (
        pytest.raises(ModelError, match="cannot be written"),
        replaced_directory(tmp_path / "drafter/inside", replaces=OURS),
    ):
        pass
    assert listing(tmp_path) == {"drafter": "mine"}
