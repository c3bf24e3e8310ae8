"""What is sent to a server: loads, length of a measurement, limits. It sends nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dspark.core import SamplingParams
from dspark.errors import InputError


class LoadKind(StrEnum):
    """How requests come."""

    CLOSED = "closed"  # so many users, each asks again as soon as it has its answer
    OPEN = "open"  # so many requests a second, whoever is still waiting (Poisson)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much comes: users of a closed load, requests a second of an open one."""

    kind: LoadKind
    level: float

    @property
    def name(self) -> str:
        """For tables and progress."""
        if self.kind is LoadKind.OPEN:
            return f"{self.level:g} requests/s"
        return "1 user" if self.level == 1 else f"{self.level:g} users"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchConfig:
    """The points, one after the other."""

    concurrency: Sequence[int] = (1, 4, 16)
    """Users of a closed load: each asks again as soon as it has its answer."""
    rates: Sequence[float] = ()
    """Requests a second of an open load, Poisson arrivals; none are measured by default."""
    seconds: float = 20.0
    """Length of one measurement."""
    warmup_seconds: float = 3.0
    """Time under the same load before it."""
    max_new_tokens: int = 128
    """Tokens of each answer, at most; an answer may end before."""
    temperature: float = 1.0
    """Sampling temperature."""
    sla_ttft_ms: float | None = None
    """Longest wait for the first token that counts as good service."""
    sla_itl_ms: float | None = None
    """Longest time between two tokens, on average over an answer, that does."""
    seed: int = 0
    """Seed of the order of prompts and of arrivals."""
    timeout_seconds: float = 120.0
    """Longest silence of the server within a request."""

    def __post_init__(self) -> None:
        for name, values in (("concurrency", self.concurrency), ("rates", self.rates)):
            if any(value <= 0 for value in values) or len(set(values)) < len(values):
                raise InputError(
                    f"{name} is {list(values)}, but its values must be different and above 0."
                )
        if not self.loads:
            raise InputError("A bench needs a load: give --concurrency or --rates.")
        limits = {"sla_ttft_ms": self.sla_ttft_ms, "sla_itl_ms": self.sla_itl_ms}
        positive = {"seconds": self.seconds, "timeout_seconds": self.timeout_seconds, **limits}
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}, but it must be above 0.")
        if not self.warmup_seconds >= 0:
            raise InputError(f"warmup_seconds is {self.warmup_seconds}, but it must be >= 0.")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, but it must be >= 2.")
        SamplingParams(temperature=self.temperature, seed=self.seed)

    @property
    def loads(self) -> Sequence[Load]:
        """Closed loads, then open ones."""
        closed = [Load(kind=LoadKind.CLOSED, level=level) for level in self.concurrency]
        return [*closed, *(Load(kind=LoadKind.OPEN, level=level) for level in self.rates)]

    @property
    def has_sla(self) -> bool:
        """Whether good service is defined."""
        return self.sla_ttft_ms is not None or self.sla_itl_ms is not None

    def settings(self) -> Mapping[str, Any]:
        """All that two points must share to stand in one table; not which points there are."""
        values = asdict(self)
        del values["concurrency"], values["rates"]
        return values
