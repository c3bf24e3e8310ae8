"""Tool calls: how a model is told of tools, held to their schemas, and read.

One form of call is spoken, that of Hermes and Qwen, which most open models know:

    <tool_call>
    {"name": "f", "arguments": {..}}
    </tool_call>

It knows text and JSON, no HTTP and no engine.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_BETWEEN = "\n"
"""What templates write between two calls."""
_MOST_WHITESPACE = 16
"""Characters of white space in a row: small models would add more until their answer is cut."""
_INSTRUCTIONS = """You may call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One use of a tool by the model."""

    name: str
    arguments: str
    """JSON."""


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a template without a word on tools must be told, as a system message."""
    return _INSTRUCTIONS.format(tools="\n".join(map(json.dumps, tools)))


def rendered_call(name: str, arguments: str) -> str:
    """A call of an earlier turn as the model would have written it."""
    return f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{_END}'


def grammar_of(
    tools: Sequence[Mapping[str, Any]], *, must_call: bool, may_call_again: bool
) -> dict[str, Any]:
    """xgrammar's structural tag: calls that fit schemas, in free text; `must_call`: calls alone."""
    form: dict[str, Any] = (
        {"type": "tags_with_separator", "separator": _BETWEEN}
        if must_call
        else {"type": "triggered_tags", "triggers": [_BEGIN]}
    )
    return {
        "type": "structural_tag",
        "format": {
            **form,
            "tags": [_tag(tool["function"]) for tool in tools],
            "at_least_one": must_call,
            "stop_after_first": not may_call_again,
        },
    }


def _tag(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'{_BEGIN}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
        "content": {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": _MOST_WHITESPACE,
        },
        "end": f"}}\n{_END}",
    }


class CallReader:
    """Parts a growing answer into its text and its calls, however it is cut into pieces (UC-045).

    Held back, and never longer than needed: a text that may still grow into the mark of a call.
    What follows the mark and is no call after all is text. White space behind a call belongs to the
    form of calls and is text only if text follows.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._is_behind_call = False
        self._gap = ""
        """White space between a call and the mark that was read last."""
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[Call]]:
        """What this further text makes certain."""
        self._held += text
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            if self._is_inside:
                body, mark, rest = self._held.partition(_END)
                if not mark:
                    break
                self._held, self._is_inside = rest, False
                call = _call(body)
                self._is_behind_call = call is not None
                if call is None:
                    shown.append(f"{self._gap}{_BEGIN}{body}{_END}")
                else:
                    calls.append(call)
            else:
                before, mark, rest = self._held.partition(_BEGIN)
                if not mark:
                    break
                self._gap = before if self._is_behind_call and not before.strip() else ""
                shown.append(before.removeprefix(self._gap))
                self._held, self._is_inside = rest, True
        if not self._is_inside:
            certain = self._held[: len(self._held) - _partial(self._held)]
            if certain.strip() or not self._is_behind_call:
                shown.append(certain)
                self._held = self._held.removeprefix(certain)
                self._is_behind_call = False
        self.num_calls += len(calls)
        return "".join(shown), calls

    def flush(self) -> str:
        """What is left at the end of the answer: no call, so it is text."""
        if self._is_inside:
            text = f"{self._gap}{_BEGIN}{self._held}"
        else:
            is_blank = self._is_behind_call and not self._held.strip()
            text = "" if is_blank else self._held
        self._held, self._is_inside = "", False
        return text


def new_id() -> str:
    """The name of a call."""
    return f"call_{secrets.token_hex(12)}"


def _partial(text: str) -> int:
    """Characters at the end of `text` that begin the mark of a call."""
    for length in range(min(len(text), len(_BEGIN) - 1), 0, -1):
        if _BEGIN.startswith(text[-length:]):
            return length
    return 0


def _call(body: str) -> Call | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return Call(name=found["name"], arguments=json.dumps(arguments, ensure_ascii=False))
