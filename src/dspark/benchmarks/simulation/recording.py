"""Recorded rounds: what a drafter proposed along answers, how sure it was, what was accepted.

It reads results files of `dspark evaluate` and of `dspark bench load`; it simulates nothing.
Rounds were verified in full. Verified less, they would have begun elsewhere; they are taken one
after the other nevertheless: choosing a round by where the one before it ended prefers the rounds
that accepted much, and foretells too much.
Letters: J rounds of an answer, K positions of a block.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.algorithms.calibration import Logits
from dspark.artifacts import read_lines
from dspark.benchmarks.journal import PLAIN, PromptRecord
from dspark.core import FinishReason
from dspark.errors import InputError

_WRITERS = "`dspark evaluate` or `dspark bench load`"
_USUAL_PROMPT = 64
"""Tokens of a prompt whose length an old results file does not tell."""
_HOPELESS = -30.0
"""Logit of a position that was not offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One answer and its rounds, all verified in full as far as the answer went."""

    domain: str
    num_prompt_tokens: int
    num_tokens: int
    is_stopped: bool
    """Whether the model ended it; otherwise it was cut and could have gone on."""
    starts_J: Sequence[int]
    """Tokens of the answer that were there before each round, rising."""
    accepted_J: Sequence[int]
    logits_JK: Logits | None
    """Logits of c_k, `None` for a drafter without confidences."""
    copied_J: Sequence[bool]
    """Rounds whose block was a copy: the drafter had no part in it."""

    @property
    def num_rounds(self) -> int:
        """At least one."""
        return len(self.starts_J)

    def round_at(self, position: int) -> int:
        """The last round that began with at most `position` tokens of the answer there.

        An answer asked in its middle starts with it; from then on each round is followed by the
        next one, however much of it was verified, and the first one follows the last.
        """
        span = max(self.num_tokens - 1, 1)
        return max(bisect_right(self.starts_J, 1 + (position - 1) % span) - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Answers of one drafter at one temperature."""

    answers: Sequence[RecordedAnswer]
    block_size: int
    temperature: float

    @classmethod
    def of(cls, records: Iterable[PromptRecord]) -> "Recording":
        """From records of one drafter at one temperature, of whole blocks.

        Raises `InputError` for records without drafts, of mixed conditions, or of trimmed rounds,
        which tell nothing of what was not verified (UC-128).
        """
        kept = list(records)
        if not any(any(record.offered) for record in kept):
            raise InputError("These results hold no round with drafts; record some answers first.")
        cells = {(r.cell.drafter, r.cell.weights, r.cell.temperature) for r in kept}
        if len(cells) > 1:
            raise InputError(
                f"These results hold rounds of {len(cells)} drafters or temperatures; name one."
            )
        block_size = max(max(record.offered, default=0) for record in kept)
        for record in kept:
            _require_whole(record)
        return cls(
            answers=[_answer(record, block_size) for record in kept],
            block_size=block_size,
            temperature=kept[0].cell.temperature,
        )


def read_records(paths: Sequence[str | Path]) -> list[PromptRecord]:
    """All records of some results files. Raises `InputError` for files of anything else."""
    return [record for path in paths for record in _records_of(Path(path))]


def recordings_of(records: Sequence[PromptRecord]) -> Mapping[float, Recording]:
    """A recording for each temperature, whole blocks only."""
    whole = [r for r in records if r.cell.width is None and r.cell.drafter != PLAIN]
    temperatures = list(dict.fromkeys(r.cell.temperature for r in whole))
    if not temperatures:
        raise InputError(
            "These results hold no round whose whole block was verified; record some with "
            "`dspark bench load --record FILE` or `dspark evaluate --results FILE`."
        )
    return {
        temperature: Recording.of(r for r in whole if r.cell.temperature == temperature)
        for temperature in temperatures
    }


def _records_of(path: Path) -> Iterator[PromptRecord]:
    lines = read_lines(path, wanted=f"a results file of {_WRITERS}")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            found = _record(row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{path} line {number} is no recorded answer; give a results file of {_WRITERS}."
            ) from error
        if found is not None:
            yield found


def _record(row: Mapping[str, Any]) -> PromptRecord | None:
    """`None` for lines that hold something else of the same kinds of files."""
    if "answer" in row:
        return PromptRecord.from_row(row["answer"]["record"])
    if not {"settings", "unit", "work", "step_cost", "profile"}.isdisjoint(row):
        return None
    return PromptRecord.from_row(row)


def _require_whole(record: PromptRecord) -> None:
    position = 1
    for offered, planned, committed in zip(
        record.offered, record.planned, record.committed, strict=True
    ):
        # an answer that was cut leaves its last rounds less room than a block
        if planned < min(offered, record.num_tokens - position - 1):
            raise InputError(
                f"A round at T={record.cell.temperature:g} verified {planned} of {offered} drafted "
                "tokens; record rounds whose whole block is verified."
            )
        position += committed


def _answer(record: PromptRecord, block_size: int) -> RecordedAnswer:
    starts, position = [], 1
    for committed in record.committed:
        starts.append(position)
        position += committed
    logits = None
    if record.confidence is not None:
        logits = np.full((len(starts), block_size), _HOPELESS, dtype=np.float32)
        for row, values in zip(logits, record.confidence, strict=True):
            row[: len(values)] = values
    known = record.num_prompt_tokens
    return RecordedAnswer(
        domain=record.cell.task,
        num_prompt_tokens=_USUAL_PROMPT if known is None else known,
        num_tokens=max(record.num_tokens, 1),
        is_stopped=record.finish_reason == FinishReason.STOP.value,
        starts_J=starts or [1],
        accepted_J=list(record.accepted) or [0],
        logits_JK=logits,
        copied_J=record.copied or [False] * len(starts or [1]),
    )
