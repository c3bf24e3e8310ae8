"""The answers file: what the target said to each prompt, ids exactly as generated.

One JSON object a line. It does not know how the answers are generated: `prepare` is given a
callable. It never encodes text again, so trained ids are the generated ids (UC-103).
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark.data.prompts import Prompt
from dspark.errors import CapacityError, InputError


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

    def ids(self) -> Tensor:
        """Prompt and answer, int64 [T]."""
        return torch.tensor([*self.prompt_token_ids, *self.token_ids], dtype=torch.long)

    def loss_mask(self) -> Tensor:
        """bool [T]: the answer's own tokens; nothing of the prompt (UC-093, UC-095)."""
        mask_T = torch.ones(len(self.prompt_token_ids) + len(self.token_ids), dtype=torch.bool)
        mask_T[: len(self.prompt_token_ids)] = False
        return mask_T


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one prompt is to be answered."""

    temperature: float
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0.0 and 0.0 < self.top_p <= 1.0):
            raise InputError(
                f"temperature {self.temperature!r} with top_p {self.top_p!r} cannot be sampled; "
                "temperature must be at least 0 and top_p lie in (0, 1]."
            )


Generate = Callable[[Sequence[Prompt], Sequence[Sampling]], Sequence[Answer]]
"""Answers a batch of prompts, in order; each answer carries its prompt's id and domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareReport:
    """What one call of `prepare` did."""

    num_prompts: int
    num_done_before: int
    num_answered: int
    num_answer_tokens: int


def read_answers(path: str | Path) -> list[Answer]:
    """All whole lines of the file; a last line without its end is left out, as after a kill."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} is no answers file; write one with `dspark prepare`.")
    return list(_parse(file, file.read_bytes()))


def prepare(
    prompts: Sequence[Prompt],
    path: str | Path,
    *,
    generate: Generate,
    samplings: Sequence[Sampling],
    batch_size: int = 64,
    on_batch: Callable[[int, int], None] | None = None,
) -> PrepareReport:
    """Answer each prompt exactly once, appending to `path`; run again, it goes on (any kill).

    Prompt number i uses `samplings[i % len(samplings)]`, whatever was done before. A batch is
    one append followed by a sync; a line cut by a kill is removed first and answered again.
    `on_batch(done, total)` reports progress.
    """
    if not samplings:
        raise InputError("samplings is empty, but at least one temperature is needed.")
    file = Path(path)
    done = repair(file)
    _check_unique(prompts)
    todo = [
        (prompt, samplings[index % len(samplings)])
        for index, prompt in enumerate(prompts)
        if prompt.id not in done
    ]
    num_tokens = 0
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        answers = generate([prompt for prompt, _ in batch], [sampling for _, sampling in batch])
        _check_order([prompt for prompt, _ in batch], answers)
        append(file, answers)
        num_tokens += sum(len(answer.token_ids) for answer in answers)
        if on_batch is not None:
            on_batch(len(prompts) - len(todo) + start + len(batch), len(prompts))
    return PrepareReport(
        num_prompts=len(prompts),
        num_done_before=len(prompts) - len(todo),
        num_answered=len(todo),
        num_answer_tokens=num_tokens,
    )


def repair(file: Path) -> set[str]:
    """Cut a last line that a kill left unfinished; the ids that are answered."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return set()
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        os.truncate(file, len(whole))
    return {answer.id for answer in _parse(file, whole)}


def append(file: Path, answers: Sequence[Answer]) -> None:
    """Add lines and wait until they are on the disk; a full disk is a `CapacityError`."""
    data = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers).encode()
    try:
        with file.open("ab") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CapacityError(
            f"{file} took no more answers ({error}); free some disk space and run the same "
            "command again, finished answers are kept."
        ) from error


def _parse(file: Path, raw: bytes) -> Iterator[Answer]:
    names = set(Answer.__slots__)
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file} line {number} is not JSON ({error}).") from error
        if not isinstance(row, dict) or not names <= row.keys():
            missing = sorted(names - row.keys()) if isinstance(row, dict) else sorted(names)
            raise InputError(f"{file} line {number} lacks {', '.join(missing)}.")
        yield Answer(**{name: row[name] for name in names})


def _check_unique(prompts: Sequence[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InputError(f"Prompt id {prompt.id!r} occurs twice; give each prompt its own id.")
        seen.add(prompt.id)


def _check_order(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> None:
    assert [p.id for p in prompts] == [a.id for a in answers], "generate must keep the order"
