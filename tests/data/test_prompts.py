import json
from pathlib import Path
from typing import Any

import pytest

from dspark.data.prompts import read_prompts, with_system
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
            {"id": "e", "prompt": "Hello"},
            {
                "id": "f",
                "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            },
        ],
    )
    chats = [prompt.as_chat() for prompt in read_prompts(file).prompts]
    assert chats == [[{"role": "user", "content": "Hello"}]] * 6


def test_all_turns_of_a_sharegpt_row_are_kept_by_role(tmp_path: Path):
    """UC-097: the user's turns in order, roles by name; every answer is to be generated anew."""
    turns = [
        {"from": "human", "value": "1"},
        {"from": "gpt", "value": "one"},
        {"from": "human", "value": "2"},
        {"from": "gpt", "value": "two"},
        {"from": "human", "value": "3"},
        {"from": "gpt", "value": "three"},
    ]
    system = {"from": "system", "value": "Be brief."}
    rows = [
        {"conversations": [system, *turns]},
        {"conversations": turns, "system": "Be brief."},  # a field of the row
        {"turns": ["1", "2", "3"], "system": "Be brief."},
    ]
    for prompt in read_prompts(write(tmp_path, rows)).prompts:
        assert (prompt.system, list(prompt.turns)) == ("Be brief.", ["1", "2", "3"])
    chat = prompt.as_chat(["eins", "zwei"])
    assert [m["role"] for m in chat] == ["system", *["user", "assistant"] * 2, "user"]
    assert [m["content"] for m in chat] == ["Be brief.", "1", "eins", "2", "zwei", "3"]
    assert prompt.as_chat() == chat[:2]


def test_a_column_map_finds_what_has_another_name(tmp_path: Path):
    rows = [
        {"uid": 5, "chat": [{"role": "user", "content": "Hi"}], "kind": "small talk", "turns": []},
        {"uid": 6, "kind": "none"},
    ]
    columns = {"messages": "chat", "id": "uid", "domain": "kind"}
    found = read_prompts(write(tmp_path, rows), columns=columns)
    (prompt,) = found.prompts
    assert (prompt.id, prompt.domain, list(prompt.turns)) == ("5", "small talk", ["Hi"])
    assert found.reasons() == {"no column 'chat'": 1}
    with pytest.raises(InputError, match="column 'mesages' means nothing"):
        read_prompts(write(tmp_path, rows), columns={"mesages": "chat"})


def test_a_system_prompt_is_for_rows_that_bring_none(tmp_path: Path):
    rows = [{"turns": ["a"]}, {"turns": ["b"], "system": "Own."}]
    prompts = with_system(read_prompts(write(tmp_path, rows)).prompts, "Given.")
    assert [prompt.system for prompt in prompts] == ["Given.", "Own."]


def test_rows_that_cannot_be_asked_are_left_out_and_counted_by_reason(tmp_path: Path):
    """UC-096, UC-098, UC-160: none of them ends the job."""
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
        ([user, {"role": "assistant", "tool_calls": [{}]}, user], "tool roles"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image or other parts that are not text",
        ),
        ([{"role": "wizard", "content": "x"}], "unknown role"),
        (["Hi"], "entry is not an object"),
        ([user, {"role": "system", "content": "s"}, user], "system turn inside the conversation"),
    ]
    rows: list[Any] = [{"messages": messages} for messages, _ in bad]
    rows += ["a bare string", {"text": "Hi"}, {"id": "good", "turns": ["Hi"]}]
    found = read_prompts(write(tmp_path, rows))
    assert [prompt.id for prompt in found.prompts] == ["good"]
    expected = [reason for _, reason in bad]
    expected += ["not an object", "no turns, messages, conversations or prompt"]
    assert [row.reason for row in found.skipped] == expected
    assert [row.line for row in found.skipped] == list(range(1, len(expected) + 1))
    assert found.reasons()["empty turn"] == 2


def test_a_line_that_is_no_json_is_counted_and_not_fatal(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"turns": ["a"]}\n\xff\xfe broken\n\n{"turns": ["b"]}\n{"turns": ["cut')
    found = read_prompts(file)
    assert [prompt.turns[0] for prompt in found.prompts] == ["a", "b"]
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
    with pytest.raises(InputError, match=r"holds no usable prompt \(not an object: 2\); each"):
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
