"""What a load sweep measures: policies, loads, temperatures, repeats. It measures nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dspark.algorithms.policies import parse_policy
from dspark.core import Coupling, SamplingParams
from dspark.errors import InputError

NONE = "none"
AUTO = "auto"
MTP1 = "mtp1"
OPEN_REQUESTS = 64
"""Requests in flight under an open load; others wait."""
_FEW_USERS, _FEW_TIMES = 2, 2.0
"""Of so many users a second commits few tokens, and what a policy gains depends on the text: their
measurements take so many times as long."""


class LoadKind(StrEnum):
    """How requests come."""

    CLOSED = "closed"  # so many users, each asks again as soon as it has its answer
    OPEN = "open"  # so many requests a second, whoever is still waiting (Poisson)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Load:
    """How much comes: users of a closed load, requests a second of an open one."""

    kind: LoadKind
    level: float

    @property
    def name(self) -> str:
        """The level as a key of the JSON: "8", "2.5"."""
        return f"{self.level:g}"

    @property
    def times(self) -> float:
        """Times as long as those of other loads that its measurements take."""
        return _FEW_TIMES if self.has_few else 1.0

    @property
    def has_few(self) -> bool:
        """Whether it has so few users that the text of single answers shows in its figures."""
        return self.kind is LoadKind.CLOSED and self.level <= _FEW_USERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is measured in one piece: one policy under one load, once."""

    temperature: float
    load: Load
    policy: str
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The sweep; the defaults are those of the project's own figures."""

    policies: Sequence[str]
    """What plans how many drafted tokens are verified, by the names that `policies.parse_policy`
    reads: auto, none, mtp1, fixed:3, threshold:0.5, table:4=5,16=3."""
    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    """Users of a closed load: each asks again as soon as it has its answer."""
    rates: Sequence[float] = ()
    """Requests a second of an open load, Poisson arrivals; none are measured by default."""
    temperatures: Sequence[float] = (1.0, 0.0)
    """Sampling temperatures; the first one gives the report's top-level figures."""
    repeats: int = 7
    """Rounds of each load: in a round every policy does the same work, in rotating order; medians
    count."""
    unit_s: float = 1.5
    """Seconds of one measurement, by plain decoding's speed at that load; all policies then do the
    work that plain decoding does in this time, in whole answers. Of one or two users it lasts twice
    as long and holds as many answers of each domain."""
    budget_minutes: float | None = None
    """Minutes for the whole run: shortens each measurement to fit, and stops in any case. The same
    command goes on where it stopped."""
    max_new_tokens: int = 96
    """Tokens of each answer, whatever ends it."""
    max_step_tokens: int = 512
    """Tokens of one target pass: verify windows first, prompt chunks in what is left."""
    seed: int = 0
    """Seed of the order of prompts, of arrivals and of the answers above temperature 0."""
    coupling: Coupling = Coupling.MAXIMAL
    """How draft and target are drawn together above temperature 0: maximal or shared-noise."""

    def __post_init__(self) -> None:
        self._check_what_is_swept()
        for name in ("repeats", "max_new_tokens", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        for name, value in (("unit_s", self.unit_s), ("budget_minutes", self.budget_minutes)):
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}, but it must be above 0.")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)

    def _check_what_is_swept(self) -> None:
        for name, values in (("concurrency", self.concurrency), ("rates", self.rates)):
            if any(value <= 0 for value in values) or len(set(values)) < len(values):
                raise InputError(
                    f"{name} is {list(values)}, but its values must be different and above 0."
                )
        if not self.loads:
            raise InputError("concurrency and rates are empty; give --concurrency or --rates.")
        for name in ("policies", "temperatures"):
            values = getattr(self, name)
            if not values:
                raise InputError(f"{name} is empty; name one at least.")
            if len(set(values)) < len(values):
                raise InputError(f"{name} is {list(values)}, but each may stand there once.")
        for policy in self.policies:
            parse_policy(policy)

    @property
    def loads(self) -> Sequence[Load]:
        """Closed loads, then open ones."""
        closed = [Load(kind=LoadKind.CLOSED, level=level) for level in self.concurrency]
        return [*closed, *(Load(kind=LoadKind.OPEN, level=level) for level in self.rates)]

    def sittings(self) -> Sequence[tuple[float, Load]]:
        """Temperatures and loads, in the order in which they are measured."""
        return [(temperature, load) for temperature in self.temperatures for load in self.loads]

    def rounds(self, temperature: float, load: Load) -> Sequence[Sequence[Unit]]:
        """The units of a sitting: in each repeat all policies, another one first every time."""
        found = []
        for repeat in range(self.repeats):
            first = (repeat + self.loads.index(load)) % len(self.policies)
            found.append(
                [
                    Unit(temperature=temperature, load=load, policy=policy, repeat=repeat)
                    for policy in (*self.policies[first:], *self.policies[:first])
                ]
            )
        return found

    def units(self) -> Iterator[Unit]:
        """Every unit once, sitting by sitting, round by round."""
        for temperature, load in self.sittings():
            for units in self.rounds(temperature, load):
                yield from units

    @property
    def most_requests(self) -> int:
        """Requests in flight, at most."""
        return int(max([*self.concurrency, *([OPEN_REQUESTS] if self.rates else [])]))

    @property
    def num_units(self) -> int:
        """How many `units` there are."""
        per_repeat = len(self.temperatures) * len(self.loads) * len(self.policies)
        return self.repeats * per_repeat

    @property
    def num_lengths(self) -> float:
        """Lengths of a measurement that all of them take together."""
        times = sum(load.times for load in self.loads)
        return self.repeats * len(self.temperatures) * len(self.policies) * times


def default_policies(block_size: int) -> list[str]:
    """The scheduler and what it is to beat: plain decoding, every fixed width, a threshold."""
    widths = [f"fixed:{width}" for width in range(2, block_size + 1)]
    return [AUTO, NONE, MTP1, *widths, "threshold:0.5"]


def policy_names(text: str) -> list[str]:
    """Policies as they are typed, with commas between them and inside a table's steps."""
    names: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if names and "=" in part and ":" not in part:  # a further step of the table before it
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    return names
