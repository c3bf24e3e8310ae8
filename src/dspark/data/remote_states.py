"""Hidden states from other processes: target workers compute, trainers receive.

Only taps and last hidden states travel, (M + D) numbers a token instead of V logits. A trainer
asks ahead for the step after the one it reads, so that both sides work at the same time. It knows
no drafter.

Letters: legend in core.py; N tokens of all asked sequences.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from dspark.data.answers import Answer
from dspark.data.hidden_states import States
from dspark.errors import ModelError
from dspark.models.target import Target

_STOP = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """What travels for each token."""

    tap_size: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Taps and last hidden state."""
        return (self.tap_size + self.hidden_size) * self.dtype.itemsize


class RemoteStates:
    """The trainer's side: asks one worker, receives in the order of asking."""

    def __init__(
        self, *, worker: int, sizes: StateSizes, device: torch.device | None = None
    ) -> None:
        self.sizes = sizes
        self.num_tokens = 0
        """Tokens received so far."""
        self._worker = worker
        self._device = torch.device("cpu") if device is None else device
        self._asked: deque[tuple[str, ...]] = deque()
        self._lengths: dict[tuple[str, ...], list[int]] = {}
        self._arrived: dict[tuple[str, ...], list[States]] = {}
        self._sending: list[tuple[distributed.Work, Tensor]] = []

    def expect(self, answers: Sequence[Answer]) -> None:
        """Ask for these now and read them later."""
        key = _key(answers)
        if key in self._lengths:
            return
        sequences = [answer.ids() for answer in answers]
        lengths = [len(ids) for ids in sequences]
        header = torch.tensor([len(lengths), sum(lengths)])
        for tensor in (header, torch.tensor(lengths), torch.cat(sequences)):
            work = distributed.isend(tensor, dst=self._worker)
            assert work is not None
            self._sending.append((work, tensor))  # alive until it has gone
        self._asked.append(key)
        self._lengths[key] = lengths

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """States of these answers; what was asked for before them is kept for its own read."""
        self.expect(answers)
        key = _key(answers)
        while key not in self._arrived:
            first = self._asked.popleft()
            self._arrived[first] = self._receive(self._lengths[first])
        del self._lengths[key]
        return self._arrived.pop(key)

    def close(self) -> None:
        """Take what is still on its way and let the worker go."""
        for key in self._asked:
            self._receive(self._lengths[key])
        self._asked.clear()
        distributed.send(torch.tensor([_STOP, 0]), dst=self._worker)

    def _receive(self, lengths: Sequence[int]) -> list[States]:
        count, sizes = sum(lengths), self.sizes
        width = sizes.tap_size + sizes.hidden_size
        row_NX = torch.empty(count, width, dtype=sizes.dtype, device=self._device)
        distributed.recv(row_NX, src=self._worker)
        self.num_tokens += count
        self._sending = [(w, t) for w, t in self._sending if not w.is_completed()]
        return [
            States(taps_NM=part[:, : sizes.tap_size], last_ND=part[:, sizes.tap_size :], lse_N=None)
            for part in torch.split(row_NX, list(lengths))
        ]


def serve_states(target: Target, *, tap_layers: Sequence[int], trainers: Sequence[int]) -> int:
    """The worker's side: answers its trainers until each has said that it is done.

    Returns the number of tokens computed. Raises `ModelError` for a request that makes no sense.
    """
    open_trainers = set(trainers)
    sending: dict[int, tuple[distributed.Work, Tensor]] = {}
    num_tokens = 0
    while open_trainers:
        header = torch.zeros(2, dtype=torch.int64)
        trainer = distributed.recv(header)
        assert trainer is not None
        count, total = header.tolist()
        if count == _STOP:
            open_trainers.discard(trainer)
            continue
        lengths = torch.zeros(count, dtype=torch.int64)
        distributed.recv(lengths, src=trainer)
        if int(lengths.sum()) != total:
            raise ModelError(
                f"Trainer {trainer} asked for {total} tokens in sequences of {int(lengths.sum())}; "
                "all processes must run the same version."
            )
        ids_N = torch.zeros(total, dtype=torch.int64)
        distributed.recv(ids_N, src=trainer)
        output = target.states(torch.split(ids_N, lengths.tolist()), tap_layers=tap_layers)
        row_NX = torch.cat((output.taps_NM, output.hidden_ND), dim=1).contiguous()
        num_tokens += total
        if trainer in sending:
            sending.pop(trainer)[0].wait()
        work = distributed.isend(row_NX, dst=trainer)
        assert work is not None
        sending[trainer] = (work, row_NX)  # alive until it has gone
    return num_tokens


def _key(answers: Sequence[Answer]) -> tuple[str, ...]:
    return tuple(answer.id for answer in answers)
