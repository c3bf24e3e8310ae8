"""What a round asks of each of its requests, as the operators of `kernels.draft` and
`kernels.decision` read it: one column a request. It knows no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from dspark.algorithms.noise import RoundNoise
from dspark.core import Coupling, SamplingParams


class DrawKind(IntEnum):
    """How a request's tokens are drawn."""

    GREEDY = 0
    SHARED = 1
    MAXIMAL = 2

    @classmethod
    def of(cls, params: SamplingParams) -> "DrawKind":
        """The kind that `params` asks for."""
        if params.is_greedy:
            return cls.GREEDY
        is_shared = params.effective_coupling is Coupling.SHARED_NOISE
        return cls.SHARED if is_shared else cls.MAXIMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTable:
    """R requests: `counters_CR` int64 with rows kind, seed, position, round, anchor.

    Position is that of the first drafted token, round the number of rounds that the request has
    had, anchor its last token. `temperatures_R` float32; that of a greedy request is not read.
    """

    counters_CR: Tensor
    temperatures_R: Tensor

    @classmethod
    def of(
        cls,
        counters: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        *,
        device: torch.device,
    ) -> "RoundTable":
        """From the five rows kind, seed, position, round and anchor, a column a request."""
        return cls(
            counters_CR=torch.tensor(counters, dtype=torch.int64, device=device),
            temperatures_R=torch.tensor(temperatures, dtype=torch.float32, device=device),
        )

    def __len__(self) -> int:
        return self.counters_CR.shape[1]

    @property
    def anchors_R(self) -> Tensor:
        """Last token of each request, int64 [R]."""
        return self.counters_CR[4]

    @property
    def noise(self) -> RoundNoise:
        """The counters as noise reads them."""
        _, seed_R, position_R, round_R, _ = self.counters_CR.unbind()
        return RoundNoise(seed_R=seed_R, position_R=position_R, round_R=round_R)

    def pick(self, requests: Sequence[int]) -> "RoundTable":
        """The columns of these requests; the table itself if they are all of them in order."""
        if len(requests) == len(self):
            return self
        index = torch.tensor(list(requests), dtype=torch.int64, device=self.counters_CR.device)
        return RoundTable(
            counters_CR=self.counters_CR[:, index], temperatures_R=self.temperatures_R[index]
        )
