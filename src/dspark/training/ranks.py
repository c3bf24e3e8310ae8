"""The processes that train one drafter together: how many they are and what they add up.

One process is the same code with nobody to talk to. It knows no model and no batch.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor, distributed

from dspark.errors import InputError


class Ranks(Protocol):
    """The trainer processes, seen from one of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group(self) -> distributed.ProcessGroup | None:
        """Theirs; `None` for a single process."""
        ...

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks."""
        ...

    def largest(self, value: float) -> float:
        """The largest value of any rank."""
        ...

    def wait(self) -> None:
        """Until every rank is here."""
        ...


class OneProcess:
    """A training without company."""

    rank = 0
    size = 1
    group = None

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def largest(self, value: float) -> float:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""


class Group:
    """The ranks of a process group: gloo on a CPU, NCCL on GPUs."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = distributed.group.WORLD if group is None else group
        self.rank = distributed.get_rank(group)
        self.size = distributed.get_world_size(group)

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """One message for all tensors of a type."""
        by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for parts in by_type.values():
            flat = torch.cat([part.reshape(-1) for part in parts])
            distributed.all_reduce(flat, group=self.group)
            pieces = torch.split(flat, [part.numel() for part in parts])
            for part, summed in zip(parts, pieces, strict=True):
                part.copy_(summed.view_as(part))

    def largest(self, value: float) -> float:
        """By a message of eight bytes."""
        largest = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self.group)
        return float(largest)

    def wait(self) -> None:
        """A barrier."""
        distributed.barrier(group=self.group)


def is_launched() -> bool:
    """Whether `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def launched() -> Iterator[None]:
    """The process group that `torchrun` describes, for as long as the block runs."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise InputError(
            f"This process is not one of several ({', '.join(missing)} not set); start it with "
            "torchrun --nproc-per-node N -m dspark train .."
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # one rank fills the cache of hidden states while the others wait, which may take days
    distributed.init_process_group(backend, timeout=timedelta(days=14))
    try:
        yield
    finally:
        distributed.destroy_process_group()
