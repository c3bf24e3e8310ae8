"""The target's states of whole answers, computed when they are wanted.

It does not know what a drafter learns from them. States, not logits, are kept: D numbers a
layer and token instead of V (method section 7).

Letters: legend in core.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.data.answers import Answer
from dspark.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What the target computed for the N tokens of one sequence.

    `taps_NM` outputs of the tapped layers side by side; `last_ND` after the final norm;
    `lse_N` float32 log-sum-exp of the full-vocabulary logits, NaN at positions where it was
    not computed (prompts), `None` when it is not known at all. The last token of a sequence
    need not have run through the target: no block ever reads its row.
    """

    taps_NM: Tensor
    last_ND: Tensor
    lse_N: Tensor | None


class StatesSource(Protocol):
    """Where a trainer's states come from: `OnlineStates`, `StatesCache` or `RemoteStates`."""

    def expect(self, answers: Sequence[Answer]) -> None:
        """These will be read next; a source that has to wait for them may ask now."""
        ...

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """States of some answers, in their order."""
        ...


class OnlineStates:
    """The target runs whenever states are wanted: no disk, and one target pass an epoch."""

    def __init__(self, target: Target, *, tap_layers: Sequence[int]) -> None:
        self._target = target
        self._tap_layers = tuple(tap_layers)

    def expect(self, answers: Sequence[Answer]) -> None:
        """Nothing to prepare."""

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """One flattened pass over all of them; no log-sum-exp."""
        sequences = [answer.ids() for answer in answers]
        output = self._target.states(sequences, tap_layers=self._tap_layers)
        lengths = [len(ids) for ids in sequences]
        pairs = zip(
            torch.split(output.taps_NM, lengths),
            torch.split(output.hidden_ND, lengths),
            strict=True,
        )
        return [States(taps_NM=taps, last_ND=last, lse_N=None) for taps, last in pairs]


def passes(answers: Sequence[Answer], tokens_per_pass: int) -> Iterator[list[Answer]]:
    """Answers in their order, gathered until a pass has its tokens."""
    part: list[Answer] = []
    num_tokens = 0
    for answer in answers:
        part.append(answer)
        num_tokens += len(answer.prompt_token_ids) + len(answer.token_ids)
        if num_tokens >= tokens_per_pass:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part
