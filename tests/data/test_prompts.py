import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.prompts import read_prompts
from dspark.errors import InputError


def write(path: Path, rows: list[Any]) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_same_chat_in_three_encodings_is_the_same_prompt(tmp_path: Path):
    """UC-098."""
    file = write(
        tmp_path,
        [
            {"id": "a", "turns": ["Hello"]},
            {"id": "b", "messages": [{"role": "user", "content": "Hello"}]},
            {"id": "c", "conversations": [{"from": "human", "value": "Hello"}]},
            {"id": "d", "conversations": [{"role": "user", "content": "Hello"}]},
        ],
    )
    chats = [prompt.as_chat() for prompt in read_prompts(file).prompts]
    assert chats == [[{"role": "user", "content": "Hello"}]] * 4


def test_all_turns_of_a_sharegpt_row_are_kept_by_role(tmp_path: Path):
    """UC-097: five turns and a system prompt; the answer to the last user turn is generated."""
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1"},
        {"from": "gpt", "value": "one"},
        {"from": "human", "value": "2"},
        {"from": "gpt", "value": "two"},
        {"from": "human", "value": "3"},
        {"from": "gpt", "value": "three"},
    ]
    (prompt,) = read_prompts(write(tmp_path, [{"conversations": turns}])).prompts
    assert [m.role for m in prompt.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert [m.content for m in prompt.messages] == ["Be brief.", "1", "one", "2", "two", "3"]


def test_rows_that_cannot_be_asked_are_left_out_and_counted_by_reason(tmp_path: Path):
    """UC-096, UC-098: none of them ends the job."""
    user = {"role": "user", "content": "Hi"}
    bad = [
        ([], "empty conversation"),
        ([{"role": "system", "content": "s"}], "no user turn"),
        ([{"role": "assistant", "content": "a"}, user], "assistant speaks first"),
        ([user, user], "two turns of one role in a row"),
        ([user, {"role": "assistant", "content": ""}, user], "empty turn"),
        ([{"role": "user", "content": None}], "content is not text"),
        ([{"role": "user", "content": " \n"}], "empty turn"),
        ([user, {"role": "tool", "content": "{}"}, user], "tool roles"),
        ([{"role": "wizard", "content": "x"}], "unknown role"),
        (["Hi"], "entry is not an object"),
        ([user, {"role": "system", "content": "s"}, user], "system turn inside the conversation"),
    ]
    rows: list[Any] = [{"messages": messages} for messages, _ in bad]
    rows += ["a bare string", {"text": "Hi"}, {"id": "good", "turns": ["Hi"]}]
    found = read_prompts(write(tmp_path, rows))
    assert [prompt.id for prompt in found.prompts] == ["good"]
    expected = [reason for _, reason in bad]
    expected += ["not an object", "no turns, messages or conversations"]
    assert [row.reason for row in found.skipped] == expected
    assert [row.line for row in found.skipped] == list(range(1, len(expected) + 1))
    assert found.reasons()["empty turn"] == 2


def test_a_line_that_is_no_json_is_counted_and_not_fatal(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"turns": ["a"]}\n\xff\xfe broken\n\n{"turns": ["b"]}\n{"turns": ["cut')
    found = read_prompts(file)
    assert [prompt.messages[0].content for prompt in found.prompts] == ["a", "b"]
    assert [(row.line, row.reason) for row in found.skipped] == [(2, "not JSON"), (5, "not JSON")]


def test_ids_are_unique_and_made_of_the_line_where_a_row_has_none(tmp_path: Path):
    file = write(
        tmp_path, [{"id": 7, "turns": ["a"]}, {"id": "7", "turns": ["b"]}, {"turns": ["c"]}]
    )
    found = read_prompts(file)
    assert [prompt.id for prompt in found.prompts] == ["7", "prompts-3"]
    assert found.skipped[0].reason == "id occurs twice"


def test_domain_and_limit(tmp_path: Path):
    file = write(tmp_path, [{"turns": ["a"], "domain": "math"}, {"turns": ["b"]}, {"turns": ["c"]}])
    found = read_prompts(file, limit=2, domain="chat")
    assert [prompt.domain for prompt in found.prompts] == ["math", "chat"]


def test_a_file_without_a_usable_prompt_says_why(tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no usable prompt \(not an object: 2\)"):
        read_prompts(write(tmp_path, ["x", "y"]))
    with pytest.raises(InputError, match="is not a file"):
        read_prompts(tmp_path / "missing.jsonl")


def test_the_shared_training_prompts_are_all_usable():
    file = Path(__file__).parents[3] / "shared/data/prompts/train.jsonl"
    if not file.exists():
        pytest.skip("../shared/data is not beside the repository")
    found = read_prompts(file)
    assert len(found.prompts) + len(found.skipped) == 15931
    assert len(found.skipped) < 10
