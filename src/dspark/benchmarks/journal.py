"""The results file of an evaluation: one line a prompt, written when its answer has ended.

It knows counts and seconds; it runs no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.algorithms.calibration_metrics import ConfidenceRounds
from dspark.algorithms.survival import AcceptanceStats
from dspark.benchmarks.results_file import ResultsFile
from dspark.completion import Completion
from dspark.core import FinishReason, RoundResult

PLAIN = "plain"
"""Drafter name of the run without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One drafter on one task under one condition."""

    drafter: str
    weights: str
    """Hash of the drafter's files: results of other weights are never taken over."""
    temperature: float
    width: int | None
    """Largest number of drafted tokens verified in a round; `None`: the whole block."""
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One answered prompt; the four lists have one entry for each round."""

    cell: Cell
    index: int
    prompt: str
    """Hash of the conversation."""
    num_tokens: int
    seconds: float
    """Wall-clock since the previous answer of this cell ended: the cell's sum is its time."""
    finish_reason: str
    offered: Sequence[int]
    planned: Sequence[int]
    accepted: Sequence[int]
    committed: Sequence[int]
    confidence: Sequence[Sequence[float]] | None
    """Logits of the confidences of each round, `None` without them."""
    num_prompt_tokens: int | None = None
    """Length of the prompt as ids; files of older versions do not know it."""
    copied: Sequence[bool] | None = None
    """Whether the block of each round was a copy of the answer's own text; `None`: none was."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "PromptRecord":
        """What `asdict` wrote. Raises `TypeError` or `KeyError` for anything else."""
        return cls(**{**row, "cell": Cell(**row["cell"])})

    @classmethod
    def of(
        cls, cell: Cell, completion: Completion, *, index: int, prompt: str, seconds: float
    ) -> "PromptRecord":
        """What a completion tells, the prompt's own pass left out."""
        return cls.of_rounds(
            cell,
            completion.rounds,
            index=index,
            prompt=prompt,
            seconds=seconds,
            num_prompt_tokens=len(completion.prompt_ids),
        )

    @classmethod
    def of_rounds(
        cls,
        cell: Cell,
        rounds: Sequence[RoundResult],
        *,
        index: int,
        prompt: str,
        seconds: float,
        num_prompt_tokens: int,
    ) -> "PromptRecord":
        """What the rounds of a finished answer tell, the first of which is the prompt's own."""
        reason = rounds[-1].finish_reason if rounds else FinishReason.LENGTH
        assert reason is not None, "the answer has ended"
        kept = [item for item in rounds if not item.is_prefill]
        logits = [item.confidence_logits for item in kept]
        copied = [item.is_copied for item in kept]
        return cls(
            cell=cell,
            index=index,
            prompt=prompt,
            num_tokens=sum(len(item.token_ids) for item in rounds),
            seconds=seconds,
            finish_reason=reason.value,
            offered=[item.num_offered for item in kept],
            planned=[item.num_planned for item in kept],
            accepted=[item.num_accepted for item in kept],
            committed=[len(item.token_ids) for item in kept],
            confidence=[list(row or ()) for row in logits] if any(logits) else None,
            num_prompt_tokens=num_prompt_tokens,
            copied=copied if any(copied) else None,
        )

    @property
    def stats(self) -> AcceptanceStats:
        """The counts of its rounds."""
        total = AcceptanceStats()
        for offered, planned, accepted, committed in zip(
            self.offered, self.planned, self.accepted, self.committed, strict=True
        ):
            total += AcceptanceStats.of_round(
                num_offered=offered,
                num_planned=planned,
                num_accepted=accepted,
                num_committed=committed,
            )
        return total

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut by a limit."""
        return self.finish_reason != FinishReason.STOP.value


def confidence_rounds(records: Sequence[PromptRecord]) -> ConfidenceRounds | None:
    """The rounds of some answers for the measures of confidence; `None` if none carries any.

    Only whole blocks are kept: near an answer's end a round may be offered less.
    """
    rows = [row for record in records for row in _confident(record)]
    size = max((len(logits) for logits, _, _ in rows), default=0)
    rows = [row for row in rows if len(row[0]) == size]
    if not rows:
        return None
    return ConfidenceRounds(
        logits_RK=torch.tensor([logits for logits, _, _ in rows], dtype=torch.float32),
        verified_R=torch.tensor([verified for _, verified, _ in rows]),
        accepted_R=torch.tensor([accepted for _, _, accepted in rows]),
    )


def _confident(record: PromptRecord) -> Iterator[tuple[Sequence[float], int, int]]:
    for logits, planned, accepted, committed in zip(
        record.confidence or (), record.planned, record.accepted, record.committed, strict=False
    ):
        if logits:
            # an answer that ended inside the window tells nothing of what stands behind its end
            yield logits, accepted if committed == accepted else planned, accepted


class Journal:
    """The answered prompts of a results file whose settings they all share."""

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any]) -> None:
        """Opens or begins the file. Raises `InputError` if it holds results of other settings."""
        self._file = ResultsFile(path, settings=settings, owner="an evaluation")
        self.path = self._file.path
        self._records = {_key(record): record for record in self._found()}

    def find(self, cell: Cell, *, index: int, prompt: str) -> PromptRecord | None:
        """The line of a prompt that was measured before."""
        return self._records.get((cell, index, prompt))

    def add(self, record: PromptRecord) -> None:
        """Append a line and wait until it is on the disk."""
        self._file.add(asdict(record))
        self._records[_key(record)] = record

    def _found(self) -> Iterator[PromptRecord]:
        for number, row in enumerate(self._file.rows, start=1):
            try:
                yield PromptRecord.from_row(row)
            except (TypeError, KeyError) as error:
                raise self._file.foreign(number) from error


def _key(record: PromptRecord) -> tuple[Cell, int, str]:
    return record.cell, record.index, record.prompt
