"""`dspark bench load`: every policy under every load, in turn, until all is measured or time is up.

It knows how to open an engine by the name of a policy, nothing of what the policy does. What the
figures say is computed in `load.report`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dspark.benchmarks.load.config import NONE, OPEN_REQUESTS, Load, LoadConfig, LoadKind, Unit
from dspark.benchmarks.load.deck import Deck, Task
from dspark.benchmarks.load.loop import Clock, Engine, poisson, run_closed, run_open
from dspark.benchmarks.load.results import Answer, LoadResults
from dspark.benchmarks.load.tally import Measured

_MEASURING = 0.6
"""Share of the whole time that goes into steady states; ramp-up and loading take the rest."""
_PILOT_STEPS = 8
_LEAST_STEPS = 16
"""Tokens of each user in a unit, at least, however little time there is."""
_OPEN_LENGTH = 4.0
"""An open unit takes this many times a closed one's seconds: its requests come and go."""


class Engines(Protocol):
    """Where engines come from (`load.engines.LocalEngines` is one)."""

    def open(self, policy: str, *, num_users: int) -> Engine:
        """An engine for so many requests at a time; what the policy has learnt stays with it."""

    def answers(self, tasks: Sequence[Task], *, temperature: float) -> Iterator[Answer]:
        """Each task answered once, every block verified whole; as they end."""


OnUnit = Callable[[Unit, Measured, int], None]
"""Hears of (unit, its figures, units done)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Everything that a run needs, and the clocks that tests set."""

    engines: Engines
    tasks: Sequence[Task]
    config: LoadConfig
    results: LoadResults
    clock: Clock = time.perf_counter
    """Times steps."""
    wall: Clock = time.monotonic
    """Tells when the budget of minutes is spent."""

    def run(self, *, on_unit: OnUnit | None = None) -> bool:
        """Measure what the results do not hold yet; whether everything is measured now."""
        started = self.wall()
        decks = {t: self._deck(t) for t in self.config.temperatures}
        for load in self.config.loads:
            if load not in self.results.work:
                self.results.add_work(load, self._work(load, decks[self.config.temperatures[0]]))
        for unit in self.config.units():
            if unit in self.results.units:
                continue
            budget = self.config.budget_minutes
            if budget is not None and self.wall() - started > 60.0 * budget:
                return False
            deck = replace(decks[unit.temperature], seed=self.config.seed + unit.repeat)
            measured = self._measure(unit.policy, unit.load, deck, self.results.work[unit.load])
            self.results.add_unit(unit, measured)
            if on_unit is not None:
                on_unit(unit, measured, len(self.results.units))
        return True

    def _deck(self, temperature: float) -> Deck:
        """The tasks with the beginnings of their answers, which are asked now if they are not."""
        found = {
            answer.record.index: answer
            for answer in self.results.answers
            if answer.record.cell.temperature == temperature
        }
        missing = [index for index in range(len(self.tasks)) if index not in found]
        asked = [self.tasks[index] for index in missing]
        for answer in self.engines.answers(asked, temperature=temperature) if asked else ():
            index = missing[answer.record.index]
            found[index] = replace(answer, record=replace(answer.record, index=index))
            self.results.add_answer(found[index])
        return Deck(
            tasks=[
                replace(task, answer_ids=found[index].token_ids)
                for index, task in enumerate(self.tasks)
            ],
            temperature=temperature,
            max_new_tokens=self.config.max_new_tokens,
            coupling=self.config.coupling,
            seed=self.config.seed,
        )

    @property
    def _unit_s(self) -> float:
        budget = self.config.budget_minutes
        if budget is None:
            return self.config.unit_s
        return min(self.config.unit_s, 60.0 * budget * _MEASURING / self.config.num_units)

    def _work(self, load: Load, deck: Deck) -> float:
        """Tokens that plain decoding commits in `unit_s`, or seconds of an open load."""
        if load.kind is LoadKind.OPEN:
            return _OPEN_LENGTH * self._unit_s
        pilot = self._measure(NONE, load, deck, _PILOT_STEPS * load.level)
        return max(pilot.tokens_per_s * self._unit_s, _LEAST_STEPS * load.level)

    def _measure(self, policy: str, load: Load, deck: Deck, work: float) -> Measured:
        return measure_load(
            lambda num_users: self.engines.open(policy, num_users=num_users),
            load,
            deck,
            work=work,
            clock=self.clock,
        )


def measure_load(
    open_engine: Callable[[int], Engine], load: Load, deck: Deck, *, work: float, clock: Clock
) -> Measured:
    """One unit on a fresh engine: `work` tokens of a closed load, or seconds of an open one."""
    if load.kind is LoadKind.OPEN:
        arrivals = poisson(deck, rate=load.level)
        return run_open(open_engine(OPEN_REQUESTS), arrivals, seconds=work, clock=clock)
    num_users = int(load.level)
    engine = open_engine(num_users)
    return run_closed(engine, deck, num_users=num_users, num_tokens=int(work), clock=clock)
