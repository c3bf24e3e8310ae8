"""Prompts from JSON lines in the three encodings people have. It does not know tokens.

`turns` (list of user turns), OpenAI `messages`, ShareGPT `conversations`. A row that cannot be
asked is left out, counted by reason and named; it never ends the job (UC-096..098).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspark.errors import InputError

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat; role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A chat that ends with a user turn and waits for the target's answer."""

    id: str
    domain: str
    messages: Sequence[Message]

    def as_chat(self) -> list[dict[str, str]]:
        """The form that chat templates take."""
        return [{"role": m.role, "content": m.content} for m in self.messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that cannot be asked: where it stands and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """Prompts of a file and the rows that were left out."""

    prompts: Sequence[Prompt]
    skipped: Sequence[SkippedRow]

    def reasons(self) -> Mapping[str, int]:
        """How many rows were left out for each reason."""
        return Counter(row.reason for row in self.skipped)


def read_prompts(
    path: str | Path, *, limit: int | None = None, domain: str = "other"
) -> PromptFile:
    """Prompts of a JSON-lines file, at most `limit`; `domain` is for rows that name none."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} is not a file; give a JSON-lines file of prompts.")
    prompts: list[Prompt] = []
    skipped: list[SkippedRow] = []
    seen: set[str] = set()
    with file.open("rb") as stream:
        for line, raw in enumerate(stream, start=1):
            if limit is not None and len(prompts) >= limit:
                break
            if not raw.strip():
                continue
            parsed = _parse(raw, fallback_id=f"{file.stem}-{line}", domain=domain)
            if isinstance(parsed, Prompt) and parsed.id in seen:
                parsed = "id occurs twice"
            if isinstance(parsed, str):
                skipped.append(SkippedRow(line=line, reason=parsed))
            else:
                seen.add(parsed.id)
                prompts.append(parsed)
    if not prompts:
        reasons = Counter(row.reason for row in skipped)
        listed = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "empty"
        raise InputError(f"{file} holds no usable prompt ({listed}).")
    return PromptFile(prompts=prompts, skipped=skipped)


def _parse(raw: bytes, *, fallback_id: str, domain: str) -> Prompt | str:
    """The prompt of a line, or the reason why there is none."""
    try:
        row = json.loads(raw)
    except ValueError:
        return "not JSON"
    if not isinstance(row, dict):
        return "not an object"
    messages = _messages(row)
    if isinstance(messages, str):
        return messages
    return Prompt(
        id=str(row.get("id", fallback_id)),
        domain=str(row.get("domain", row.get("category", domain))),
        messages=messages,
    )


def _messages(row: Mapping[str, Any]) -> list[Message] | str:
    for key, reader in (("turns", _from_turns), ("messages", _from_messages)):
        if isinstance(row.get(key), list):
            return _asked(reader(row[key]))
    if isinstance(row.get("conversations"), list):
        return _asked(_from_sharegpt(row["conversations"]))
    return "no turns, messages or conversations"


def _from_turns(turns: Sequence[Any]) -> list[Message] | str:
    """User turns only: the first one is asked, later ones would need the target's answers."""
    if not turns:
        return "empty conversation"
    if not isinstance(turns[0], str):
        return "content is not text"
    return [Message(role="user", content=turns[0])]


def _from_messages(entries: Sequence[Any]) -> list[Message] | str:
    return _read(entries, role_key="role", text_key="content")


def _from_sharegpt(entries: Sequence[Any]) -> list[Message] | str:
    if entries and all(isinstance(e, dict) and "from" not in e for e in entries):
        return _from_messages(entries)  # the OpenAI form under ShareGPT's column name
    return _read(entries, role_key="from", text_key="value")


def _read(entries: Sequence[Any], *, role_key: str, text_key: str) -> list[Message] | str:
    messages = []
    for entry in entries:
        if not isinstance(entry, dict):
            return "entry is not an object"
        name = entry.get(role_key)
        if name in ("tool", "function", "function_call", "observation"):
            return "tool roles"
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            return "unknown role"
        if not isinstance(entry.get(text_key), str):
            return "content is not text"
        messages.append(Message(role=role, content=entry[text_key]))
    return messages


def _asked(messages: list[Message] | str) -> list[Message] | str:
    """Cut behind the last user turn, since the target writes the answer; check what is left."""
    if isinstance(messages, str):
        return messages
    if not messages:
        return "empty conversation"
    is_user = [message.role == "user" for message in messages]
    if True not in is_user:
        return "no user turn"
    asked = messages[: len(messages) - is_user[::-1].index(True)]
    return _fault(asked) or asked


def _fault(messages: Sequence[Message]) -> str | None:
    """Why a chat template would refuse or garble these messages."""
    chat = [message for message in messages if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        return "system turn inside the conversation"
    if chat[0].role == "assistant":
        return "assistant speaks first"
    if any(a.role == b.role for a, b in pairwise(chat)):
        return "two turns of one role in a row"
    if any(not message.content.strip() for message in chat):
        return "empty turn"
    return None
