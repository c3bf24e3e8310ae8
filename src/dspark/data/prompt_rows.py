"""Rows of prompt files: JSON lines, a JSON array, parquet, or a Hugging Face data set by its name.

It knows containers and columns; what a row means is read in `prompts`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.errors import InputError, first_line
from dspark.models import hub

Row = tuple[int, Mapping[str, Any] | str]
"""Line or row number from 1, and the row or the reason why there is none."""

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]%-]+)?")


def rows_of(source: str) -> Iterator[Row]:
    """All rows of a file, or of the data set `NAME` or `NAME:SPLIT` (train unless given).

    Raises `InputError` for what is neither, and with the remedy where a library is missing.
    """
    path = Path(source)
    if path.is_file():
        return _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    name = source.partition(":")[0]
    is_file_name = path.suffix in (".jsonl", ".json", ".parquet") or source.startswith((".", "/"))
    if not Path(name).is_dir() and (is_file_name or not _NAME.fullmatch(source)):
        raise InputError(
            f"{source} is not a file; give JSON lines or parquet, or the name of a data set."
        )
    return _data_set(source)


def stem_of(source: str) -> str:
    """A short name for ids and tasks: of a file without its ending, of a data set without owner."""
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        return path.stem
    return path.name.partition(":")[0]


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        if stream.read(1) == b"[":  # as ShareGPT comes: one array
            yield from _json_array(path)
            return
        stream.seek(0)
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            yield number, _object_of(raw)


def _json_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} begins like a JSON array and is none ({error}).") from error
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else "not an object"


def _object_of(raw: bytes) -> Mapping[str, Any] | str:
    try:
        row = json.loads(raw)
    except ValueError:
        return "not JSON"
    return row if isinstance(row, dict) else "not an object"


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise _missing("pyarrow", f"read {path}") from error
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise InputError(f"{path} is no parquet file ({error}).") from error
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _data_set(source: str) -> Iterator[Row]:
    try:
        from datasets import DatasetDict, load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise _missing("datasets", f"load the data set {source!r}") from error
    name, _, split = source.partition(":")
    if not Path(name).exists() and hub.is_out_of_reach(name, "dataset"):
        raise InputError(
            f"{source} is no file here, and {hub.endpoint()}, where a data set of this name could "
            "be, cannot be reached; give a file, or try again when there is a network."
        )
    try:
        loaded = load_dataset(name, split=split or "train")
    except (DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"The data set {source!r} could not be loaded ({first_line(error)}); give NAME or "
            "NAME:SPLIT of one that this machine can reach, or a file."
        ) from error
    assert not isinstance(loaded, DatasetDict), "one split was asked for"
    for number, row in enumerate(loaded, start=1):
        yield number, dict(row)


def _missing(library: str, purpose: str) -> InputError:
    return InputError(
        f"{library} is needed to {purpose} and is not installed; run: pip install 'dspark[data]'"
    )
