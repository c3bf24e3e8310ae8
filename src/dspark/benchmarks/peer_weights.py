"""The target in the form that another engine reads, made once and kept.

It knows files and converters, no engine's way of running.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dspark.benchmarks.gguf_weights import weights_as
from dspark.errors import ModelError
from dspark.models import embedded
from dspark.models.target_source import resolve_source

_OPENVINO_OPTIONS = {
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"],
    "fp16": ["--weight-format", "fp16"],
}


def model_path(form: str, source: str, *, python: Path, cache: Path) -> str:
    """What an engine opens for the target `source`.

    `form`: source (as it is), directory (Hugging Face), gguf-KIND or openvino-KIND. `python` is
    the engine's own; OpenVINO's holds the converter. Raises `ModelError` if it cannot be made.
    """
    kind = form.partition("-")[2]
    match form.partition("-")[0]:
        case "source":
            return source
        case "directory":
            return str(resolve_source(source))
        case "gguf":
            return str(_gguf(source, kind, cache=cache))
        case "openvino":
            return str(_openvino(Path(resolve_source(source)), kind, python, cache))
        case _:
            raise AssertionError(form)


def _gguf(source: str, kind: str, *, cache: Path) -> Path:
    path = embedded.embedded_gguf(source) if embedded.is_embedded(source) else Path(source)
    if path.suffix != ".gguf":
        raise ModelError(
            f"llama.cpp reads GGUF files and the target is {source}; give a .gguf file as target."
        )
    return path if kind == "shipped" else weights_as(path, kind, cache=cache)


def _openvino(folder: Path, kind: str, python: Path, cache: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(f"OpenVINO's converter needs a directory, and {folder} is none.")
    copy = cache / f"{folder.name}-{_fingerprint(folder)}.openvino-{kind}"
    if (copy / "openvino_model.xml").is_file():
        return copy
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".openvino-", dir=cache))
    try:
        program = python.parent / "optimum-cli"
        task = ["--model", str(folder), "--task", "text-generation-with-past"]
        command = [str(program), "export", "openvino", *task, *_OPENVINO_OPTIONS[kind]]
        done = subprocess.run(
            [*command, str(scratch / "model")],
            capture_output=True,
            text=True,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        if done.returncode != 0:
            print(done.stderr[-3000:], file=sys.stderr)
            raise ModelError(
                f"The {kind} form of {folder.name} for OpenVINO could not be made (exit code "
                f"{done.returncode}); what the converter printed stands above."
            )
        os.replace(scratch / "model", copy)  # noqa: PTH105 (atomic on one file system)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return copy


def _fingerprint(folder: Path) -> str:
    """Of a model directory: names, sizes and times of its files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    text = "".join(f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns};" for p in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
