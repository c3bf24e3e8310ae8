"""Answers that think, as a stream and as a whole: both have the same parts."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dspark.core import FinishReason, Request, SamplingParams
from dspark.llm import LLM
from dspark.serving.thoughts import Thought
from dspark.serving.wire import Wishes, Writer
from dspark.serving.work import Counts, Order, Piece

PIECES = ("<th", "ink>\nI cou", "ld", " call\n</think>", "\n\nSo", " I do")


def writer(llm: LLM, wishes: Wishes, *, thought: Thought) -> Writer:
    requests = [Request(id="o-0", prompt_ids=[1, 2], params=SamplingParams())]
    order = Order(id="o", requests=requests, arrived_s=0.0, thought=thought)
    return Writer(order, wishes, created=0, model="toy", tokenizer=llm.tokenizer)


def pieces(texts: Sequence[str]) -> list[Piece]:
    counts = Counts(num_tokens=len(texts))
    reasons = [None] * (len(texts) - 1) + [FinishReason.STOP]
    return [Piece(0, text, (7,), None, r, counts) for text, r in zip(texts, reasons, strict=True)]


def joined(events: Sequence[str], name: str) -> str:
    told = [json.loads(event.removeprefix("data: ")) for event in events if event]
    deltas = [event["choices"][0]["delta"] for event in told]
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize(
    ("thought", "texts", "parts"),
    [
        (Thought.AHEAD, PIECES, ("I could call", "So I do", 3)),
        (Thought.OPEN, ("I could", " call</think>", "So I do"), ("I could call", "So I do", 2)),
        (Thought.AHEAD, ("So", " I do"), ("", "So I do", 0)),
        (Thought.NOWHERE, ("<think>", "So"), ("", "<think>So", 0)),
    ],
)
def test_thought_and_speech_are_told_apart(
    llm: LLM, thought: Thought, texts: Sequence[str], parts: tuple[str, str, int]
) -> None:
    wishes = Wishes(is_chat=True)
    stream = writer(llm, wishes, thought=thought)
    events = [stream.chunk(piece) for piece in pieces(texts)]
    whole: dict[str, Any] = json.loads(writer(llm, wishes, thought=thought).whole(pieces(texts)))
    message = whole["choices"][0]["message"]
    found = (message.get("reasoning_content", ""), message["content"])
    assert found == parts[:2]
    assert (joined(events, "reasoning_content"), joined(events, "content")) == parts[:2]
    for usage in (whole["usage"], stream.usage()):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == parts[2]


def test_a_call_is_read_behind_the_thought_and_not_in_it(llm: LLM) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    texts = (f"<think>{call}", "</think>", call)
    wishes = Wishes(is_chat=True, has_tools=True)
    stream = writer(llm, wishes, thought=Thought.AHEAD)
    events = [stream.chunk(piece) for piece in pieces(texts)]
    assert joined(events, "reasoning_content") == call
    assert "".join(events).count('"tool_calls":[') == 1
    assert [bool(event) for event in events] == [True, False, True]  # a mark alone tells nothing
    whole = json.loads(writer(llm, wishes, thought=Thought.AHEAD).whole(pieces(texts)))
    (choice,) = whole["choices"]
    assert choice["message"]["reasoning_content"] == call
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
