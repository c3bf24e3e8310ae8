"""Containers of prompts; parquet and data sets run for real where their libraries are."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from dspark.data.prompt_rows import rows_of, stem_of
from dspark.data.prompts import read_prompts
from dspark.errors import InputError

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "domain": "chat"},
    {"id": "b", "messages": [{"role": "user", "content": "2 + 2?"}], "domain": "math"},
]


def test_a_parquet_file_gives_the_prompts_of_the_same_json_lines(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_prompts(tmp_path / "p.parquet") == read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(InputError, match="is no parquet file"):
        read_prompts(tmp_path / "bad.parquet")


@pytest.mark.filterwarnings("ignore")  # of the library's own
def test_a_data_set_is_loaded_by_its_name_and_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    found = read_prompts(f"{folder}:test")
    assert [(p.id, p.domain, list(p.turns)) for p in found.prompts] == [
        ("a", "chat", ["Hi"]),
        ("b", "math", ["2 + 2?"]),
    ]
    with pytest.raises(InputError, match="could not be loaded"):
        read_prompts(f"{folder}:validation")


def test_a_missing_library_is_one_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-162."""
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "p.parquet"
    file.write_bytes(b"")
    with pytest.raises(InputError, match=r"pyarrow is needed .* pip install 'dspark\[data\]'"):
        list(rows_of(str(file)))
    with pytest.raises(InputError, match=r"datasets is needed to load the data set 'a/b:test'"):
        list(rows_of("a/b:test"))


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/file", "two words"])
def test_what_is_neither_file_nor_name_is_refused(source: str) -> None:
    with pytest.raises(InputError, match="is not a file"):
        list(rows_of(source))


def test_a_short_name_for_ids_and_tasks() -> None:
    assert [stem_of(s) for s in ("x/gsm8k.jsonl", "p.parquet", "me/set:test", "set")] == [
        *("gsm8k", "p", "set", "set")
    ]


def test_one_json_array_is_read_row_by_row(tmp_path: Path) -> None:
    """ShareGPT is published in this form."""
    file = tmp_path / "share.json"
    file.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Hi"}]}, "x"]))
    assert [number for number, _ in rows_of(str(file))] == [1, 2]
    found = read_prompts(file)
    assert [list(p.turns) for p in found.prompts] == [["Hi"]]
    assert found.reasons() == {"not an object": 1}
    file.write_text('[{"prompt": "cut')
    with pytest.raises(InputError, match="begins like a JSON array"):
        read_prompts(file)
