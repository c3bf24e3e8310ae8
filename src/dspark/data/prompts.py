"""Prompts in the encodings people have: the user's turns of a conversation. No tokens here.

`turns` (user turns), OpenAI `messages`, ShareGPT `conversations`, or one `prompt`. Answers in a
row are left out: the target writes its own. A row that cannot be asked is left out, counted by
reason and named; it never ends the job (UC-096 to UC-098, UC-160).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dspark.data.prompt_rows import Row, rows_of, stem_of
from dspark.errors import InputError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
_TOOL_ROLES = ("tool", "function", "function_call", "observation")
_KEYS = ("turns", "messages", "conversations", "prompt")
_ONE_KEY = f"{', '.join(_KEYS[:-1])} or {_KEYS[-1]}"
COLUMNS = ("id", "domain", "system", *_KEYS)
"""Keys of a row that mean something; a column map renames others to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a user says in one conversation, turn after turn."""

    id: str
    domain: str
    system: str | None
    """`None`: the chat template's own."""
    turns: Sequence[str]

    def as_chat(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation up to the user turn that follows `answers`, for a chat template."""
        chat = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn, answer in zip(self.turns, answers, strict=False):
            chat.append({"role": "user", "content": turn})
            chat.append({"role": "assistant", "content": answer})
        return [*chat, {"role": "user", "content": self.turns[len(answers)]}]


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
    source: object,
    *,
    limit: int | None = None,
    domain: str = "other",
    columns: Mapping[str, str] | None = None,
) -> PromptFile:
    """Prompts of a file or a data set (`rows_of`), at most `limit`.

    `domain` is for rows that name none; `columns` says which column of theirs holds what we call
    `id`, `domain`, `system`, `turns`, `messages`, `conversations` or `prompt`; `None` where the
    caller has no option for that. Raises `InputError` for a source that cannot be read or holds no
    usable prompt.
    """
    name, renamed = str(source), _checked(columns or {})
    prompts: list[Prompt] = []
    skipped: list[SkippedRow] = []
    seen: set[str] = set()
    for row in rows_of(name):
        if limit is not None and len(prompts) >= limit:
            break
        parsed = _parse(
            row, fallback_id=f"{stem_of(name)}-{row[0]}", domain=domain, renamed=renamed
        )
        if isinstance(parsed, Prompt) and parsed.id in seen:
            parsed = "id occurs twice"
        if isinstance(parsed, str):
            skipped.append(SkippedRow(line=row[0], reason=parsed))
        else:
            seen.add(parsed.id)
            prompts.append(parsed)
    if not prompts:
        reasons = Counter(row.reason for row in skipped)
        listed = ", ".join(f"{reason}: {count}" for reason, count in reasons.items()) or "empty"
        raise InputError(
            f"{name} holds no usable prompt ({listed}); each row needs {_ONE_KEY}"
            + (
                ", or tell by --column which one it is, as in prompt=question."
                if columns is not None
                else "."
            )
        )
    return PromptFile(prompts=prompts, skipped=skipped)


def with_system(prompts: Sequence[Prompt], system: str) -> list[Prompt]:
    """The same prompts under this system prompt, those that bring their own unchanged."""
    return [replace(p, system=system) if p.system is None else p for p in prompts]


def _checked(columns: Mapping[str, str]) -> Mapping[str, str]:
    for key in columns:
        if key not in COLUMNS:
            raise InputError(
                f"column {key!r} means nothing; give --column one of {', '.join(COLUMNS)}."
            )
    return columns


def _parse(row: Row, *, fallback_id: str, domain: str, renamed: Mapping[str, str]) -> Prompt | str:
    """The prompt of a row, or the reason why there is none."""
    _, values = row
    if isinstance(values, str):
        return values
    for key, column in renamed.items():
        if column not in values:
            return f"no column {column!r}"
        values = {**values, key: values[column]}
    if any(key in renamed for key in _KEYS):  # what is mapped is what is meant
        values = {k: v for k, v in values.items() if k not in _KEYS or k in renamed}
    messages = _messages(values)
    if isinstance(messages, str):
        return messages
    system, turns = _split(messages)
    row_system = values.get("system")
    if isinstance(row_system, str) and row_system.strip() and system is None:
        system = row_system
    return Prompt(
        id=str(values.get("id") if values.get("id") is not None else fallback_id),
        domain=str(values.get("domain") or values.get("category") or domain),
        system=system,
        turns=turns,
    )


Messages = list[tuple[str, str]]
"""Role and text, roles being system, user and assistant."""


def _messages(row: Mapping[str, Any]) -> Messages | str:
    if isinstance(row.get("turns"), list):
        return _asked(_from_turns(row["turns"]))
    if isinstance(row.get("messages"), list):
        return _asked(_read(row["messages"], role_key="role", text_key="content"))
    if isinstance(row.get("conversations"), list):
        return _asked(_from_sharegpt(row["conversations"]))
    if isinstance(row.get("prompt"), str):
        return _asked([("user", row["prompt"])])
    return f"no {_ONE_KEY}"


def _from_turns(turns: Sequence[Any]) -> Messages | str:
    """User turns; the answers between them are to come."""
    found: Messages = []
    for turn in turns:
        if not isinstance(turn, str):
            return "content is not text"
        found += [("user", turn), ("assistant", "to be written")]
    return found


def _from_sharegpt(entries: Sequence[Any]) -> Messages | str:
    if entries and all(isinstance(e, dict) and "from" not in e for e in entries):
        return _read(entries, role_key="role", text_key="content")  # OpenAI's form, this name
    return _read(entries, role_key="from", text_key="value")


def _read(entries: Sequence[Any], *, role_key: str, text_key: str) -> Messages | str:
    messages: Messages = []
    for entry in entries:
        if not isinstance(entry, dict):
            return "entry is not an object"
        name = entry.get(role_key)
        if name in _TOOL_ROLES or entry.get("tool_calls"):
            return "tool roles"
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            return "unknown role"
        text = _text(entry.get(text_key))
        if text is None:
            return _untold(entry.get(text_key))
        messages.append((role, text))
    return messages


def _text(content: Any) -> str | None:
    """A message's text; of a list of parts if all of them are text."""
    if isinstance(content, list) and content:
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "".join(texts)
    return content if isinstance(content, str) else None


def _untold(content: Any) -> str:
    kinds = content if isinstance(content, list) else ()
    if any(isinstance(part, dict) and part.get("type") != "text" for part in kinds):
        return "image or other parts that are not text"
    return "content is not text"


def _asked(messages: Messages | str) -> Messages | str:
    """Cut behind the last user turn, since the target writes the answers; check what is left."""
    if isinstance(messages, str):
        return messages
    if not messages:
        return "empty conversation"
    is_user = [role == "user" for role, _ in messages]
    if True not in is_user:
        return "no user turn"
    asked = messages[: len(messages) - is_user[::-1].index(True)]
    return _fault(asked) or asked


def _fault(messages: Messages) -> str | None:
    """Why a chat template would refuse or garble these messages."""
    chat = [(role, text) for role, text in messages if role != "system"]
    if any(role == "system" for role, _ in messages[1:]):
        return "system turn inside the conversation"
    if chat[0][0] == "assistant":
        return "assistant speaks first"
    if any(a[0] == b[0] for a, b in pairwise(chat)):
        return "two turns of one role in a row"
    if any(not text.strip() for _, text in chat):
        return "empty turn"
    return None


def _split(messages: Messages) -> tuple[str | None, list[str]]:
    systems = [text for role, text in messages if role == "system" and text.strip()]
    return (systems[0] if systems else None), [text for role, text in messages if role == "user"]
