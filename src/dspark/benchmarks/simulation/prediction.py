"""What the simulator foretells of a load sweep: the same requests, the same work, no engine.

It sees the profile and the rounds that were recorded before the sweep, never a figure of it.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dspark.benchmarks.load.config import Load, LoadConfig
from dspark.benchmarks.load.deck import Deck
from dspark.benchmarks.load.sweep import measure_load
from dspark.benchmarks.simulation.engine import (
    SimulatedClock,
    SimulatedEngine,
    Sizes,
    tasks_of,
)
from dspark.benchmarks.simulation.simulate import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrediction:
    """Foretells the units of a sweep: call it with (temperature, policy, load)."""

    machines: Mapping[float, Machine]
    """By temperature; their recordings hold the sweep's tasks in the sweep's order."""
    config: LoadConfig
    work: Mapping[Load, float]
    """Of each unit, as the sweep settled it."""

    def __call__(self, temperature: float, policy: str, load: Load) -> float | None:
        """Median tokens/s over the repeats; `None` for what is not known."""
        machine = self.machines.get(temperature)
        if machine is None or load not in self.work:
            return None
        deck = Deck(
            tasks=tasks_of(machine.recording),
            temperature=temperature,
            max_new_tokens=self.config.max_new_tokens,
            coupling=self.config.coupling,
            seed=self.config.seed,
        )
        planner = machine.planner(policy)  # what it learns stays with it, as in the sweep
        rates = []
        for repeat in range(self.config.repeats):
            clock = SimulatedClock()

            def engine(num_users: int, clock: SimulatedClock = clock) -> SimulatedEngine:
                return SimulatedEngine(
                    machine.recording,
                    cost=machine.cost,
                    planner=planner,
                    sizes=Sizes(
                        max_requests=num_users, max_step_tokens=self.config.max_step_tokens
                    ),
                    clock=clock,
                )

            found = measure_load(
                engine,
                load,
                replace(deck, seed=self.config.seed + repeat),
                work=self.work[load],
                clock=clock,
            )
            rates.append(found.tokens_per_s)
        return statistics.median(rates)
