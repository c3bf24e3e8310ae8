"""Keeps an engine under load, closed or open, and adds up its steady state.

Time is the time of steps: what happens between them (dealing prompts, adding up) is not counted,
and an open load that waits for its next arrival does not wait in earnest. It knows no policy.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dspark.benchmarks.load.deck import Ask, Deck
from dspark.benchmarks.load.tally import Measured, Tally
from dspark.core import Request, StepResult

_WARM_STEPS = 4
"""Steps in which everybody decodes before the clock runs: plans look two steps back."""
_MOST_STEPS = 20
"""Times the steps that a token a user and step would take: an engine that stalls ends there."""


class Engine(Protocol):
    """What a load needs of an engine (`engine.cycle.Cycle` is one)."""

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    def step(self) -> StepResult:
        """One round of every request that can take part."""

    def abort(self, request_id: str) -> bool:
        """End a request now."""


Clock = Callable[[], float]


@dataclass(slots=True)
class _Users:
    """Who waits or runs in an engine, by request id."""

    engine: Engine
    prefix: str
    domain_of: dict[str, str] = field(default_factory=dict)
    is_decoding: dict[str, bool] = field(default_factory=dict)
    num_asked: int = 0

    def ask(self, ask: Ask) -> str:
        name = f"{self.prefix}-{self.num_asked}"
        self.num_asked += 1
        self.engine.submit(Request(id=name, prompt_ids=ask.prompt_ids, params=ask.params))
        self.domain_of[name] = ask.domain
        self.is_decoding[name] = False
        return name

    def take(self, result: StepResult) -> int:
        """Notes who decodes and who has ended; how many have ended."""
        num_ended = 0
        for item in result.rounds:
            self.is_decoding[item.request_id] = True
            if item.finish_reason is not None:
                del self.is_decoding[item.request_id]
                num_ended += 1
        return num_ended

    def leave(self) -> None:
        """Everybody goes."""
        for name in list(self.is_decoding):
            self.engine.abort(name)


class ClosedLoad:
    """`num_users` on an engine, each of whom asks again as soon as the answer is there.

    It stands still between two stretches. Where two of them begin and end at the same totals of
    tokens, the same deck has asked both for the same work, whatever they draft.
    """

    def __init__(
        self,
        engine: Engine,
        deck: Deck,
        *,
        num_users: int,
        clock: Clock,
        between: Callable[[float], None] | None = None,
    ) -> None:
        """`between` hears of the seconds of each step of a stretch; what it does is not counted."""
        self._between = between
        self.num_tokens = 0
        """Committed so far, ramp-up included."""
        self._engine, self._clock, self._num_users = engine, clock, num_users
        self._asks = deck.deal_aged(num_users)
        self._users = _Users(engine, "closed")
        for _ in range(num_users):
            self._users.ask(next(self._asks))

    def ramp_up(self) -> None:
        """Until everybody decodes, and a few steps more."""
        first = set(self._users.is_decoding)
        while any(not self._users.is_decoding.get(name, True) for name in first):
            self._step()
        for _ in range(_WARM_STEPS):
            self._step()

    def run_to(self, num_tokens: int) -> Measured:
        """The stretch until so many tokens are committed in all; at least a step."""
        tally = Tally()
        most_steps = _MOST_STEPS * (1 + (num_tokens - self.num_tokens) // self._num_users)
        while not tally.steps_s or (
            self.num_tokens < num_tokens and len(tally.steps_s) < most_steps
        ):
            result, seconds = self._step()
            tally.add(result, seconds, self._users.domain_of)
            if self._between is not None:
                self._between(seconds)
        return tally.measured()

    def leave(self) -> None:
        """Everybody goes; what is in flight is dropped."""
        self._users.leave()

    def _step(self) -> tuple[StepResult, float]:
        started = self._clock()
        result = self._engine.step()
        seconds = self._clock() - started
        self.num_tokens += sum(len(item.token_ids) for item in result.rounds)
        for _ in range(self._users.take(result)):
            self._users.ask(next(self._asks))
        return result, seconds


def run_closed(
    engine: Engine, deck: Deck, *, num_users: int, num_tokens: int, clock: Clock
) -> Measured:
    """One stretch of `num_tokens` behind the ramp-up."""
    load = ClosedLoad(engine, deck, num_users=num_users, clock=clock)
    try:
        load.ramp_up()
        return load.run_to(load.num_tokens + num_tokens)
    finally:
        load.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and when it comes."""

    at_s: float
    ask: Ask


def run_open(
    engine: Engine,
    arrivals: Iterable[Arrival],
    *,
    seconds: float,
    clock: Clock,
    warm_share: float = 0.25,
) -> Measured:
    """Requests come at their times for `seconds` of engine time, whoever still waits.

    The first `warm_share` of the time is left out; so is what is in flight at the end. The load
    also ends when all that will ever come has been answered.
    """
    coming = iter(arrivals)
    users, tally = _Users(engine, "open"), Tally()
    arrived_at: dict[str, float] = {}
    now, idle_s = 0.0, 0.0
    warm_s = warm_share * seconds if warm_share else 0.0  # a load may last until all is answered
    following = next(coming, None)
    try:
        while now < seconds:
            while following is not None and following.at_s <= now:
                arrived_at[users.ask(following.ask)] = following.at_s
                following = next(coming, None)
            if not engine.has_work:
                if following is None:
                    break
                until = min(following.at_s, seconds)
                idle_s += max(until - max(now, warm_s), 0.0)
                now = until
                continue
            started = clock()
            result = engine.step()
            passed = clock() - started
            now += passed
            users.take(result)
            if now - passed >= warm_s:
                tally.add(result, passed, users.domain_of)
                for item in result.rounds:
                    if item.is_prefill:
                        tally.ttft_s.append(now - arrived_at[item.request_id])
    finally:
        users.leave()
    return tally.measured(idle_s=idle_s)


def poisson(deck: Deck, *, rate: float) -> Iterator[Arrival]:
    """`rate` requests a second without memory; a function of the deck's seed alone."""
    rng = np.random.default_rng([deck.seed, 1])
    at_s = 0.0
    for ask in deck.deal():
        at_s += rng.exponential(1.0 / rate)
        yield Arrival(at_s=at_s, ask=ask)
