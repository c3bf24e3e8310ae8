"""`dspark bench load`: every policy under every load, in turn, until all is measured or time is up.

It knows how to open an engine by the name of a policy, nothing of what the policy does. What the
figures say is computed in `load.report`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.load.config import NONE, OPEN_REQUESTS, Load, LoadConfig, LoadKind, Unit
from dspark.benchmarks.load.deck import Deck, Task
from dspark.benchmarks.load.loop import Clock, ClosedLoad, Engine, poisson, run_open
from dspark.benchmarks.load.results import Answer, LoadResults
from dspark.benchmarks.load.tally import Measured

_MEASURING = 0.52
"""Share of the whole time that goes into steady states; ramp-up and loading take the rest."""
_PROFILING = 0.15
"""Time that is spent on the profile beside a load, for each second of the load, at most."""
_PILOT_STEPS = 8
_LEAST_STEPS = 16
"""Tokens of each user in a unit, at least, however little time there is."""
_OPEN_LENGTH = 8.0
"""An open unit takes this many times a closed one's seconds: its requests come and go."""


class SideProfile(Protocol):
    """A profile that is taken beside a load (`engine.side_profile.SideProfile`)."""

    def take(self) -> None:
        """A piece of it."""

    def table(self) -> StepCost | None:
        """What all pieces say; `None` without any."""


class Engines(Protocol):
    """Where engines come from (`load.engines.LocalEngines` is one)."""

    def open(self, policy: str, *, num_users: int) -> Engine:
        """An engine for so many requests at a time; what the policy has learnt stays with it.

        Several are open side by side.
        """

    def answers(self, tasks: Sequence[Task], *, temperature: float) -> Iterator[Answer]:
        """Each task answered once, every block verified whole; as they end."""

    def step_cost(self, *, num_users: int) -> StepCost | None:
        """What a policy that weighs costs has found steps of so many requests to take, of late;
        `None` where none does."""

    def beside(self, *, num_users: int, temperature: float) -> SideProfile | None:
        """A profile of steps of so many requests; `None` where no policy weighs costs."""


Measure = Callable[[Unit], Measured]
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
        """Measure what the results do not hold yet; whether everything is measured now.

        Each sitting gets its share of the time that is left, by the length of its measurements, and
        ends after a whole round.
        """
        budget = self.config.budget_minutes
        up_at = math.inf if budget is None else self.wall() + 60.0 * budget
        decks = {t: self._deck(t) for t in self.config.temperatures}
        sittings = self.config.sittings()
        for number, (temperature, load) in enumerate(sittings):
            rounds = self._missing(temperature, load)
            if not rounds:
                continue
            now = self.wall()
            times = [following.times for _, following in sittings[number:]]
            until = now + (up_at - now) * times[0] / sum(times)
            deck = replace(decks[temperature], seed=self.config.seed + rounds[0][0].repeat)
            beside = self._beside(temperature, load)
            if load.kind is LoadKind.OPEN:
                begun = self._open(load, deck, rounds)
            else:
                begun = self._closed(load, deck, rounds, beside)
            with begun as measure:
                for place, units in enumerate(rounds):
                    if place and self.wall() > until:
                        break
                    for unit in units:
                        if self.wall() > up_at:
                            self._note_profile(temperature, load, beside)
                            return False
                        measured = measure(unit)
                        self.results.add_unit(unit, measured)
                        if on_unit is not None:
                            on_unit(unit, measured, len(self.results.units))
                    self._note_cost(temperature, load)
                    self._note_profile(temperature, load, beside)
        return not any(self._missing(*sitting) for sitting in sittings)

    def _beside(self, temperature: float, load: Load) -> "_Beside":
        found = None
        if load.kind is LoadKind.CLOSED:
            found = self.engines.beside(num_users=int(load.level), temperature=temperature)
        return _Beside(found, self.wall)

    def _note_cost(self, temperature: float, load: Load) -> None:
        if load.kind is LoadKind.CLOSED:
            cost = self.engines.step_cost(num_users=int(load.level))
            if cost is not None:
                self.results.add_cost(temperature, load, cost)

    def _note_profile(self, temperature: float, load: Load, beside: "_Beside") -> None:
        table = beside.table()
        if table is not None:
            self.results.add_profile(temperature, load, table)

    def _missing(self, temperature: float, load: Load) -> list[list[Unit]]:
        """What is left to measure of each round, without rounds that are whole."""
        rounds = [
            [unit for unit in units if unit not in self.results.units]
            for units in self.config.rounds(temperature, load)
        ]
        return [units for units in rounds if units]

    @contextmanager
    def _closed(
        self, load: Load, deck: Deck, rounds: Sequence[Sequence[Unit]], beside: "_Beside"
    ) -> Iterator[Measure]:
        """A load for each policy, side by side. All have committed equally many tokens when the
        first round begins; from then on each stands still while another one is measured."""
        num_users = int(load.level)
        policies = {unit.policy for units in rounds for unit in units}
        loads = {
            policy: self._load(policy, deck, num_users, beside)
            for policy in self.config.policies
            if policy in policies
        }
        try:
            if load not in self.results.work:
                plain = loads.get(NONE)
                if plain is None:
                    plain = self._load(NONE, deck, num_users, beside)
                self.results.add_work(load, self._work(plain, load))
            work = int(self.results.work[load])
            start = max(each.num_tokens for each in loads.values())
            for each in loads.values():
                if each.num_tokens < start:
                    each.run_to(start)
            ends = dict.fromkeys(loads, start)

            def measure(unit: Unit) -> Measured:
                ends[unit.policy] += work
                return loads[unit.policy].run_to(ends[unit.policy])

            yield measure
        finally:
            for each in loads.values():
                each.leave()

    def _load(self, policy: str, deck: Deck, num_users: int, beside: "_Beside") -> ClosedLoad:
        """A load whose users all decode."""
        engine = self.engines.open(policy, num_users=num_users)
        load = ClosedLoad(engine, deck, num_users=num_users, clock=self.clock, between=beside)
        load.ramp_up()
        return load

    def _work(self, plain: ClosedLoad, load: Load) -> float:
        """Tokens that plain decoding commits in a unit's time, in whole answers."""
        num_users, length = int(load.level), self.config.max_new_tokens
        pilot = plain.run_to(plain.num_tokens + _PILOT_STEPS * num_users)
        tokens = max(
            pilot.tokens_per_s * self._unit_s * load.times, float(_LEAST_STEPS * num_users)
        )
        if load.has_few:  # the domains are dealt in turn
            turn = length * len({task.domain for task in self.tasks})
            return float(math.ceil(tokens / turn) * turn)
        return float(max(round(tokens / length), 1) * length)

    @contextmanager
    def _open(self, load: Load, deck: Deck, rounds: Sequence[Sequence[Unit]]) -> Iterator[Measure]:
        """A fresh engine for every unit."""
        if load not in self.results.work:
            self.results.add_work(load, _OPEN_LENGTH * self._unit_s)
        seconds, first = self.results.work[load], rounds[0][0].repeat

        def measure(unit: Unit) -> Measured:
            arrivals = poisson(
                replace(deck, seed=deck.seed + unit.repeat - first), rate=unit.load.level
            )
            engine = self.engines.open(unit.policy, num_users=OPEN_REQUESTS)
            return run_open(engine, arrivals, seconds=seconds, clock=self.clock)

        yield measure

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
            is_whole=True,
        )

    @property
    def _unit_s(self) -> float:
        budget = self.config.budget_minutes
        if budget is None:
            return self.config.unit_s
        return min(self.config.unit_s, 60.0 * budget * _MEASURING / self.config.num_lengths)


class _Beside:
    """Pieces of a profile between the steps of a load, as long as they may be."""

    def __init__(self, profile: SideProfile | None, wall: Clock) -> None:
        self._profile, self._wall = profile, wall
        self._profiling_s = self._load_s = 0.0

    def __call__(self, seconds: float) -> None:
        """A step of the load has ended."""
        self._load_s += seconds
        if self._profile is not None and self._profiling_s <= _PROFILING * self._load_s:
            begun = self._wall()
            self._profile.take()
            self._profiling_s += self._wall() - begun

    def table(self) -> StepCost | None:
        """Of all pieces."""
        return None if self._profile is None else self._profile.table()
