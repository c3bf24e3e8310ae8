"""What the simulator foretells of a load sweep: the same requests, the same work, no engine.

It sees a profile and the rounds that were recorded before the sweep, never a rate of it. On a
machine whose speed changes, the profile is that of another day: `costs` are the profile as it was
corrected while a load ran, by steps that were taken beside it or by those of one of its policies.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dspark.algorithms.step_cost import StepCost, median_cost
from dspark.benchmarks.load.config import OPEN_REQUESTS, Load, LoadConfig, LoadKind
from dspark.benchmarks.load.deck import Deck
from dspark.benchmarks.load.loop import ClosedLoad, poisson, run_open
from dspark.benchmarks.simulation.engine import (
    SimulatedClock,
    SimulatedEngine,
    Sizes,
    tasks_of,
)
from dspark.benchmarks.simulation.simulate import Machine
from dspark.engine.planner import Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrediction:
    """Foretells the units of a sweep: call it with (temperature, policy, load)."""

    machines: Mapping[float, Machine]
    """By temperature; their recordings hold the sweep's tasks in the sweep's order."""
    config: LoadConfig
    work: Mapping[Load, float]
    """Of each unit, as the sweep settled it."""
    costs: Mapping[tuple[float, Load], Sequence[StepCost]] = field(default_factory=dict)
    """Corrected tables by temperature and load; their median takes the profile's place."""

    def __call__(self, temperature: float, policy: str, load: Load) -> float | None:
        """Median tokens/s over the repeats; `None` for what is not known."""
        machine = self.machines.get(temperature)
        if machine is None or load not in self.work:
            return None
        costs = self.costs.get((temperature, load))
        if costs:
            machine = replace(machine, cost=median_cost(costs))
        deck = Deck(
            tasks=tasks_of(machine.recording),
            temperature=temperature,
            max_new_tokens=self.config.max_new_tokens,
            coupling=self.config.coupling,
            seed=self.config.seed,
            is_whole=True,
        )
        planner = machine.planner(policy)  # what it learns stays with it, as in the sweep
        if load.kind is LoadKind.CLOSED:
            rates = self._closed(machine, planner, load, deck)
        else:
            rates = self._open(machine, planner, load, deck)
        return statistics.median(rates)

    def _closed(self, machine: Machine, planner: Planner, load: Load, deck: Deck) -> list[float]:
        num_users, work = int(load.level), int(self.work[load])
        engine, clock = self._engine(machine, planner, num_users)
        users = ClosedLoad(engine, deck, num_users=num_users, clock=clock)
        users.ramp_up()
        start = users.num_tokens
        return [
            users.run_to(start + (repeat + 1) * work).tokens_per_s
            for repeat in range(self.config.repeats)
        ]

    def _open(self, machine: Machine, planner: Planner, load: Load, deck: Deck) -> list[float]:
        rates = []
        for repeat in range(self.config.repeats):
            engine, clock = self._engine(machine, planner, OPEN_REQUESTS)
            arrivals = poisson(replace(deck, seed=deck.seed + repeat), rate=load.level)
            found = run_open(engine, arrivals, seconds=self.work[load], clock=clock)
            rates.append(found.tokens_per_s)
        return rates

    def _engine(
        self, machine: Machine, planner: Planner, max_requests: int
    ) -> tuple[SimulatedEngine, SimulatedClock]:
        clock = SimulatedClock()
        sizes = Sizes(max_requests=max_requests, max_step_tokens=self.config.max_step_tokens)
        engine = SimulatedEngine(
            machine.recording, cost=machine.cost, planner=planner, sizes=sizes, clock=clock
        )
        return engine, clock
