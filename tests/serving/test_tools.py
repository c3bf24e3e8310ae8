"""Calls of tools: read from any pieces, held to their schemas, told over the API."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from dspark.serving.app import App
from dspark.serving.tools import Call, CallReader, instructions, rendered_call

CALL = rendered_call("add", '{"a": 1, "b": [2]}')
TEXTS = (
    "no call at all",
    CALL,
    f"First. {CALL}\n{CALL} Last <tool",
    f"{CALL}\n<tool_call>no json</tool_call>",
    f"{CALL}\n{CALL} \n",
    f"<tool_call>no json</tool_call> {CALL}",
    "<tool_call>\n{unfinished",
    "<tool_<tool_call>[]</tool_call>",
    'a < b <tool_call>{"name": 3}</tool_call>',
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 22]}, "on": {"type": "boolean"}},
                "required": ["a", "on"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "take")
]
HELLO: Any = [{"role": "user", "content": "Hello"}]


def read(pieces: list[str]) -> tuple[str, list[Call]]:
    reader, texts, calls = CallReader(), [], []
    for piece in pieces:
        text, found = reader.push(piece)
        texts.append(text)
        calls += found
    return "".join(texts) + reader.flush(), calls


@given(text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(1, 6), min_size=1, max_size=9))
def test_any_pieces_give_what_the_whole_gives(text: str, cuts: list[int]) -> None:
    """UC-045."""
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + cuts[turn % len(cuts)]])
        at += len(pieces[-1])
        turn += 1
    assert read(pieces) == read([text])


def test_calls_are_told_from_text() -> None:
    text, calls = read([TEXTS[2]])
    assert text == "First.  Last <tool"  # the line break between calls is of their form
    assert calls == [Call(name="add", arguments='{"a": 1, "b": [2]}')] * 2
    for other in (TEXTS[0], *TEXTS[6:]):
        assert read([other]) == (other, [])
    assert read([TEXTS[3]])[0] == "\n<tool_call>no json</tool_call>"
    assert read([TEXTS[4]]) == ("", calls)
    assert read([TEXTS[5]])[0] == "<tool_call>no json</tool_call> "


def test_a_model_is_told_of_its_tools() -> None:
    text = instructions(TOOLS)
    assert json.dumps(TOOLS[0]) in text
    assert '{"name": "the name"' in text


@pytest.fixture(scope="module")
def api(live: tuple[App, str]) -> OpenAI:
    return OpenAI(base_url=f"{live[1]}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "take"}}])
def test_a_call_that_is_asked_for_fits_its_schema(api: OpenAI, choice: Any) -> None:
    """A random model writes it: only the grammar can make it fit."""
    options: Any = {
        "model": "toy",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 200,
        "logit_bias": {"1": 5},
    }
    found = api.chat.completions.create(**options).choices[0]
    assert found.finish_reason == "tool_calls"
    (call,) = found.message.tool_calls
    assert call.function.name in (("take",) if isinstance(choice, dict) else ("add", "take"))
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "on"}
    assert isinstance(arguments["on"], bool)
    assert found.message.content is None
    calls, ends, text = [], [], ""
    for chunk in api.chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta
        calls += delta.tool_calls or []
        text += delta.content or ""
        ends.append(chunk.choices[0].finish_reason)
    assert [(c.index, c.function) for c in calls] == [(0, calls[0].function)]
    assert calls[0].function.arguments == call.function.arguments
    assert ends[-1] == "tool_calls"
    assert text == ""


def test_an_answer_that_must_call_is_calls_alone(api: OpenAI) -> None:
    """What a model would add behind a call is no result of it."""
    options: Any = {
        "model": "toy",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 300,
        "seed": 1,
    }
    message = api.chat.completions.create(**options).choices[0].message
    rest = message.content or "\n<tool_call>"
    assert rest.startswith("\n<tool_call>")  # a further call, which the limit cut
    assert message.tool_calls
    chunks = list(api.chat.completions.create(**options, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    arguments = [call.function.arguments for call in message.tool_calls]
    assert [call.function.arguments for call in calls] == arguments
    assert [c.index for c in calls] == list(range(len(calls)))
    assert len(chunks) <= 2 + len(calls)  # the first, the last, and nothing while a call grows


def test_a_conversation_with_calls_goes_on(api: OpenAI) -> None:
    calls = [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1, "on": true}'},
        }
    ]
    messages: Any = [
        {"role": "system", "content": "Be kind."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    found = api.chat.completions.create(
        model="toy", messages=messages, tools=TOOLS, max_tokens=8, tool_choice="auto"
    )
    assert found.usage.prompt_tokens > 200  # it was told of its tools
    none = api.chat.completions.create(
        model="toy", messages=messages, tools=TOOLS, max_tokens=8, tool_choice="none"
    )
    assert none.usage.prompt_tokens < found.usage.prompt_tokens


def test_an_answer_follows_its_schema(api: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "is_old": {"type": "boolean"}},
        "required": ["name", "is_old"],
        "additionalProperties": False,
    }
    texts = set()
    for width in (0, 4):
        found = api.chat.completions.create(
            model="toy",
            messages=HELLO,
            temperature=0,
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            extra_body={"speculation": {"max_draft": width}},
        ).choices[0]
        assert found.finish_reason == "stop"
        texts.add(found.message.content)
        assert set(json.loads(found.message.content)) == {"name", "is_old"}
    assert len(texts) == 1
    free = api.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=4, response_format={"type": "json_object"}
    )
    assert free.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no"}},
                }
            },
            "response_format",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_fits_together_badly_is_refused(
    live: tuple[App, str], changes: dict[str, Any], param: str | None
) -> None:
    reply = httpx.post(f"{live[1]}/v1/chat/completions", json={"messages": HELLO, **changes})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
