import sys
from pathlib import Path

import pytest

from dspark.benchmarks.peer_weights import model_path
from dspark.errors import ModelError

HERE = Path(sys.executable)


def test_a_source_stays_and_a_directory_is_found(model_dir: Path, tmp_path: Path) -> None:
    assert model_path("source", "smollm2-135m", python=HERE, cache=tmp_path) == "smollm2-135m"
    assert model_path("directory", str(model_dir), python=HERE, cache=tmp_path) == str(model_dir)


def test_a_gguf_file_is_taken_as_it_was_shipped(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert model_path("gguf-shipped", str(file), python=HERE, cache=tmp_path) == str(file)


def test_llama_cpp_needs_a_gguf_file(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\.gguf"):
        model_path("gguf-bf16", str(model_dir), python=HERE, cache=tmp_path)


def _converter(folder: Path, program: str) -> Path:
    """A Python's folder with a converter in it."""
    tool = folder / "optimum-cli"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    return folder / "python"


def test_openvino_s_form_is_made_once_and_kept(model_dir: Path, tmp_path: Path) -> None:
    """The converter is called with the directory and the kind; its output appears whole."""
    program = 'for last; do :; done; mkdir "$last"; echo "$@" > "$last/openvino_model.xml"'
    python, cache = _converter(tmp_path, program), tmp_path / "cache"
    first = Path(model_path("openvino-int4", str(model_dir), python=python, cache=cache))
    words = (first / "openvino_model.xml").read_text().split()
    assert words[:4] == ["export", "openvino", "--model", str(model_dir)]
    assert words[words.index("--weight-format") + 1] == "int4"
    (tmp_path / "optimum-cli").unlink()
    again = model_path("openvino-int4", str(model_dir), python=python, cache=cache)
    assert Path(again) == first
    assert [path.name for path in cache.iterdir()] == [first.name]


def test_a_converter_that_fails_leaves_nothing(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, cache = _converter(tmp_path, "echo no memory >&2; exit 3"), tmp_path / "cache"
    with pytest.raises(ModelError, match="exit code 3"):
        model_path("openvino-int8", str(model_dir), python=python, cache=cache)
    assert "no memory" in capsys.readouterr().err
    assert not list(cache.iterdir())


def test_openvino_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="directory"):
        model_path("openvino-int8", "some-org/some-model", python=HERE, cache=tmp_path)
