"""The answers file: what the target said to each prompt, one turn a line, ids as generated.

A line `{"prepare": {...}}` says how the lines after it were made. It does not know how answers
are generated, and it never encodes text again, so trained ids are the generated ids (UC-103).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.data.durable_rows import append_row, is_unfinished_header
from dspark.errors import InputError

_HEADER = "prepare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one prompt is to be answered."""

    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and 0.0 < self.top_p <= 1.0):
            raise InputError(
                f"temperature {self.temperature!r} with top_p {self.top_p!r} cannot be sampled; "
                "temperature must be at least 0 and top_p lie in (0, 1]."
            )
        if not ((self.top_k is None or self.top_k >= 1) and 0.0 <= self.min_p <= 1.0):
            raise InputError(
                f"top_k {self.top_k!r} with min_p {self.min_p!r} cannot be sampled; top_k must be "
                "at least 1 and min_p lie in [0, 1]."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How the answers of a file were made: whoever uses a drafter later needs the same."""

    target: str
    engine: str
    """Who answered, such as "embedded bfloat16" or "endpoint NAME"."""
    template_hash: str | None
    thinking: bool | None
    """Thinking mode that the template was given; `None`: its own default."""
    system: str | None
    """System prompt of rows that bring none; `None`: that of the template."""
    samplings: Sequence[Sampling]
    """Prompt number i used entry i modulo their number."""
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One line of the file. `token_ids` holds the EOS token if the target produced one."""

    id: str
    domain: str
    temperature: float
    top_p: float
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    finish_reason: str
    text: str
    top_k: int | None = None
    min_p: float = 0.0
    conversation: str | None = None
    """Id of the prompt whose turn this answers; `None` in files of single turns: `id` itself."""
    turn: int = 0
    reasoning: str | None = None
    """Thoughts that an endpoint gave apart from the text."""
    settings: AnswerSettings | None = None
    """From the line above it that holds them; `None` in files that say nothing."""
    unsupervised: Sequence[tuple[int, int]] = ()
    """Ranges of `ids()` behind the first answer token that the target did not write: the user's
    further turns in a conversation that was put together (`join_turns`)."""

    def ids(self) -> Tensor:
        """Prompt and answer, int64 [T]."""
        return torch.tensor([*self.prompt_token_ids, *self.token_ids], dtype=torch.long)

    def loss_mask(self) -> Tensor:
        """bool [T]: the answer's own tokens; nothing of the prompt (UC-093, UC-095)."""
        mask_T = torch.ones(len(self.prompt_token_ids) + len(self.token_ids), dtype=torch.bool)
        mask_T[: len(self.prompt_token_ids)] = False
        for start, stop in self.unsupervised:
            mask_T[start:stop] = False
        return mask_T

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut it: there is no token that ends it, and none is learnt (UC-100)."""
        return self.finish_reason != "stop"

    @property
    def conversation_id(self) -> str:
        """Id of its prompt."""
        return self.id if self.conversation is None else self.conversation


_REQUIRED = (
    *("id", "domain", "temperature", "top_p", "prompt_token_ids", "token_ids"),
    *("finish_reason", "text"),
)
_OPTIONAL = ("top_k", "min_p", "conversation", "turn", "reasoning")


def read_answers(path: str | Path) -> list[Answer]:
    """All whole lines of the file; a last line without its end is left out, as after a kill."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} is no answers file; write one with `dspark prepare`.")
    return [row for row in _parse(file, file.read_bytes()) if isinstance(row, Answer)]


def join_turns(answers: Sequence[Answer]) -> list[Answer]:
    """Conversations in one piece: a turn whose prompt begins with all that was said before is put
    behind it, so that nothing is computed twice; any other turn stays a sequence of its own.

    A template that rewrites earlier turns (dropping old thoughts, UC-094) gives the latter.
    """
    joined: dict[tuple[str, int], Answer] = {}
    last_of: dict[str, tuple[str, int]] = {}
    for answer in sorted(answers, key=lambda a: a.turn):
        place = last_of.get(answer.conversation_id)
        before = None if place is None else joined[place]
        if place is not None and before is not None and _continues(before, answer):
            joined[place] = _joined(before, answer)
        else:
            last_of[answer.conversation_id] = (answer.conversation_id, answer.turn)
            joined[last_of[answer.conversation_id]] = answer
    order = {answer.id: number for number, answer in enumerate(answers)}
    return sorted(joined.values(), key=lambda answer: order[answer.id])


def _continues(before: Answer, answer: Answer) -> bool:
    said = [*before.prompt_token_ids, *before.token_ids]
    return answer.turn > before.turn and list(answer.prompt_token_ids[: len(said)]) == said


def read_all_answers(files: Sequence[Path]) -> list[Answer]:
    """The answers of several files, conversations in one piece (`join_turns`).

    Raises `InputError` if there is none, if an id occurs twice, or for answers made under
    different conditions.
    """
    answers = [answer for file in files for answer in read_answers(file)]
    if not answers:
        names = ", ".join(map(str, files))
        raise InputError(f"There is no answer in {names}; write some with `dspark prepare`.")
    conditions_of(answers)
    seen: set[str] = set()
    for answer in answers:
        if answer.id in seen:
            raise InputError(
                f"Answer id {answer.id!r} occurs twice in {', '.join(map(str, files))}; "
                "give each answer its own id."
            )
        seen.add(answer.id)
    return join_turns(answers)


def conditions_of(answers: Sequence[Answer]) -> AnswerSettings | None:
    """How the answers were made, as far as a drafter's user must do the same; `None` if unknown.

    Raises `InputError` if thinking mode, system prompt or template differ among them (UC-102).
    """
    found = {id(a.settings): a.settings for a in answers if a.settings is not None}.values()
    for name in ("thinking", "system", "template_hash"):
        values = {getattr(settings, name) for settings in found}
        if len(values) > 1:
            raise InputError(
                f"These answers were made with different values of {name} "
                f"({', '.join(map(repr, sorted(map(str, values))))}); train on one kind at a time."
            )
    return next(iter(found), None)


def _joined(before: Answer, answer: Answer) -> Answer:
    said = len(before.prompt_token_ids) + len(before.token_ids)
    asked = len(answer.prompt_token_ids)
    between = list(answer.prompt_token_ids[said:])
    return replace(
        before,
        token_ids=[*before.token_ids, *between, *answer.token_ids],
        finish_reason=answer.finish_reason,
        text=before.text + answer.text,
        unsupervised=[*before.unsupervised, (said, asked)],
    )


class AnswerFile:
    """An answers file that grows by one line a turn and goes on after a kill at any moment."""

    def __init__(self, path: str | Path, *, settings: AnswerSettings) -> None:
        """Cuts a last line that a kill left unfinished. Raises `InputError`, and leaves the file as
        it is, if it is no answers file, or was made with other settings: two kinds of answers in
        one file would teach neither."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = _repaired(self.path)
        found = [row for row in rows if isinstance(row, AnswerSettings)]
        self.turns: dict[str, list[Answer]] = {}
        """Answers of each conversation in the file, by turn."""
        for row in rows:
            if isinstance(row, Answer):
                self.turns.setdefault(row.conversation_id, []).append(row)
        for turns in self.turns.values():
            turns.sort(key=lambda answer: answer.turn)
        if found and self.turns:
            _check_same(self.path, found[-1], settings)
        else:
            if not self.turns:  # a run that got no answer settles nothing
                self.path.write_bytes(b"")
            self._write({_HEADER: asdict(settings)})

    def add(self, answer: Answer) -> None:
        """Append a line and wait until it is on the disk."""
        row = {name: getattr(answer, name) for name in (*_REQUIRED, *_OPTIONAL)}
        self._write({name: value for name, value in row.items() if value is not None})
        self.turns.setdefault(answer.conversation_id, []).append(answer)

    def _write(self, row: Mapping[str, Any]) -> None:
        append_row(self.path, row, rows="answers", kept="answers")


def _repaired(file: Path) -> list[Answer | AnswerSettings]:
    raw = file.read_bytes() if file.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]
    rows = list(_parse(file, whole))
    if not rows and not is_unfinished_header(raw, _HEADER):
        raise InputError(f"{file} holds something else than answers; name another file.")
    if len(whole) < len(raw):
        os.truncate(file, len(whole))
    return rows


def _check_same(file: Path, found: AnswerSettings, wanted: AnswerSettings) -> None:
    was, now = asdict(found), asdict(wanted)
    for name in was:
        if was[name] != now[name]:
            raise InputError(
                f"{file} holds answers made with {name} {was[name]!r}, and now it is "
                f"{now[name]!r}; name another file with --out, or take the same settings."
            )


def _parse(file: Path, raw: bytes) -> Iterator[Answer | AnswerSettings]:
    settings = None
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{file} line {number} is not JSON ({error}); give an answers file of `dspark "
                "prepare`."
            ) from error
        if isinstance(row, dict) and isinstance(row.get(_HEADER), dict):
            settings = _settings_of(row[_HEADER], file, number)
            yield settings
            continue
        missing = [
            name for name in sorted(_REQUIRED) if not isinstance(row, dict) or name not in row
        ]
        if missing:
            raise InputError(
                f"{file} line {number} lacks {', '.join(missing)}; give an answers file of "
                "`dspark prepare`."
            )
        values = {name: row[name] for name in (*_REQUIRED, *_OPTIONAL) if name in row}
        yield Answer(**values, settings=settings)


def _settings_of(values: Mapping[str, Any], file: Path, number: int) -> AnswerSettings:
    try:
        samplings = [Sampling(**entry) for entry in values["samplings"]]
        return AnswerSettings(**{**values, "samplings": samplings})
    except (TypeError, KeyError) as error:
        raise InputError(
            f"{file} line {number} does not say how its answers were made ({error})."
        ) from error
