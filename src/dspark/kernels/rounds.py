"""What a round asks of each of its requests, as the operators of `kernels.draft` and
`kernels.decision` read it: one column a request. It knows no engine.
"""

from collections.abc import Sequence
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


class RoundTable:
    """R requests: what counts them and what shapes their distributions.

    Six counters: kind, seed, position, round, anchor, top_k. Position is that of the first drafted
    token, round the number of rounds that the request has had, anchor its last token, top_k 0
    without one. Three options: temperature, top_p, min_p. Of a greedy request top_k and options
    are not read. Tensors are made when somebody asks: a step that is one call takes the numbers.
    """

    __slots__ = ("_counters_CR", "_options_OR", "counters", "device", "options")

    def __init__(
        self,
        counters: Sequence[Sequence[int]],
        options: Sequence[Sequence[float]],
        *,
        device: torch.device,
    ) -> None:
        """From the rows, a column a request."""
        self.counters = counters
        self.options = options
        self.device = device
        self._counters_CR: Tensor | None = None
        self._options_OR: Tensor | None = None

    def __len__(self) -> int:
        return len(self.counters[0])

    @property
    def counters_CR(self) -> Tensor:
        """Int64."""
        if self._counters_CR is None:
            self._counters_CR = torch.tensor(self.counters, dtype=torch.int64, device=self.device)
        return self._counters_CR

    @property
    def options_OR(self) -> Tensor:
        """Float64."""
        if self._options_OR is None:
            self._options_OR = torch.tensor(self.options, dtype=torch.float64, device=self.device)
        return self._options_OR

    @property
    def flat_counters(self) -> list[int]:
        """Row after row."""
        return [number for row in self.counters for number in row]

    @property
    def flat_options(self) -> list[float]:
        """Row after row."""
        return [number for row in self.options for number in row]

    @property
    def anchors_R(self) -> Tensor:
        """Last token of each request, int64 [R]."""
        return self.counters_CR[4]

    @property
    def noise(self) -> RoundNoise:
        """The counters as noise reads them."""
        _, seed_R, position_R, round_R, *_ = self.counters_CR.unbind()
        return RoundNoise(seed_R=seed_R, position_R=position_R, round_R=round_R)

    def pick(self, requests: Sequence[int]) -> "RoundTable":
        """The columns of these requests; the table itself if they are all of them in order."""
        if len(requests) == len(self):
            return self
        return RoundTable(
            [[row[r] for r in requests] for row in self.counters],
            [[row[r] for r in requests] for row in self.options],
            device=self.device,
        )
