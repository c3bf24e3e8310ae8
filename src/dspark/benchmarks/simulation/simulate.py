"""`dspark simulate`: policies on a machine that is a table of costs, under any load.

The planner is the engine's own, the loads are those of `bench load`, only the steps are numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.algorithms.calibration import Calibration
from dspark.algorithms.policies import parse_policy
from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.load.deck import Ask, Deck
from dspark.benchmarks.load.loop import Arrival, poisson, run_closed, run_open
from dspark.benchmarks.load.planners import planner_of
from dspark.benchmarks.load.tally import Counts, Measured
from dspark.benchmarks.simulation.arrivals import TracedRequest
from dspark.benchmarks.simulation.engine import (
    SimulatedClock,
    SimulatedEngine,
    Sizes,
    tasks_of,
)
from dspark.benchmarks.simulation.recording import Recording
from dspark.core import Coupling, SamplingParams
from dspark.engine.planner import Planner
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Which policies meet which loads."""

    policies: Sequence[str]
    """Names as `dspark bench load` takes them."""
    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    """Users of a closed load, all replicas together."""
    rates: Sequence[float] = ()
    """Requests a second of an open load, Poisson arrivals, all replicas together."""
    requests: int = 1000
    """Answers of each policy under each load, all replicas together, at most."""
    requests_per_user: int = 20
    """Answers of each user of a closed load, at most: one alone needs as many steps as a crowd."""
    replicas: int = 1
    """Engines that share the load: users evenly, arrivals in turn."""
    max_requests: int = 256
    """Requests in flight in one engine under an open load; others wait."""
    max_new_tokens: int = 256
    """Tokens of each answer, at most; a recorded one that was cut goes on from its beginning."""
    max_step_tokens: int = 512
    """Tokens of one target pass: verify windows first, prompt chunks in what is left."""
    seed: int = 0
    """Seed of the order of prompts and of arrivals."""

    def __post_init__(self) -> None:
        for name in (
            "requests",
            "requests_per_user",
            "replicas",
            "max_requests",
            "max_new_tokens",
            "max_step_tokens",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        SamplingParams(seed=self.seed)
        for users in self.concurrency:
            if users < self.replicas:
                raise InputError(
                    f"concurrency holds {users}, but {self.replicas} replicas need a user each."
                )
        if any(rate <= 0 for rate in self.rates):
            raise InputError(f"rates is {list(self.rates)}, but each must be above 0.")
        for policy in self.policies:
            parse_policy(policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPoint:
    """One policy under one load, all replicas together."""

    tokens_per_s: float
    per_user_tokens_per_s: float
    budget_per_request: float | None
    drafting_share: float | None
    tau: float | None
    step_ms: float
    in_flight: float
    ttft_ms: float | None
    """Median time to the first token of an open load."""

    @classmethod
    def of(cls, found: Sequence[Measured]) -> "SimulatedPoint":
        """What several replicas did in the same time."""
        counts = sum((m.counts for m in found), Counts())
        decoding_s = sum(m.decoding_s for m in found)
        waits = sorted(wait for m in found for wait in m.ttft_s)
        num_steps = sum(m.num_steps for m in found)
        return cls(
            tokens_per_s=sum(m.tokens_per_s for m in found),
            per_user_tokens_per_s=counts.committed / decoding_s if decoding_s else 0.0,
            budget_per_request=counts.budget_per_request,
            drafting_share=counts.drafting_share,
            tau=counts.tau,
            step_ms=1e3 * sum(m.step_s * m.num_steps for m in found) / max(num_steps, 1),
            in_flight=sum(m.in_flight for m in found),
            ttft_ms=1e3 * waits[len(waits) // 2] if waits else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Points by policy and load; loads are keys as text."""

    temperature: float
    block_size: int
    answers: int
    """Recorded answers that were replayed."""
    policies: dict[str, dict[str, SimulatedPoint]]
    open_loads: dict[str, dict[str, SimulatedPoint]]
    trace: dict[str, SimulatedPoint]

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is simulated: the cost of steps, the drafter's rounds, its calibration."""

    cost: StepCost
    recording: Recording
    calibration: Calibration | None = None
    """`None` believes the drafter's own confidences."""

    def planner(self, policy: str) -> Planner:
        """A planner that has learnt nothing yet. Raises `InputError` for an unknown name."""
        return planner_of(
            policy,
            block_size=self.recording.block_size,
            cost=lambda: self.cost,
            calibration=self.calibration,
        )


def simulate(
    machine: Machine, *, config: SimulationConfig, trace: Sequence[TracedRequest] = ()
) -> SimulationReport:
    """Every policy under every load, and under the trace if there is one."""
    simulation = _Simulation(machine=machine, config=config)
    return SimulationReport(
        temperature=machine.recording.temperature,
        block_size=machine.recording.block_size,
        answers=len(machine.recording.answers),
        policies={
            policy: {f"{users}": simulation.closed(policy, users) for users in config.concurrency}
            for policy in config.policies
        },
        open_loads={
            policy: {f"{rate:g}": simulation.open(policy, rate) for rate in config.rates}
            for policy in config.policies
            if config.rates
        },
        trace={policy: simulation.traced(policy, trace) for policy in config.policies if trace},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulation:
    machine: Machine
    config: SimulationConfig

    def closed(self, policy: str, num_users: int) -> SimulatedPoint:
        replicas = self.config.replicas
        found = []
        for replica in range(replicas):
            users = num_users // replicas + (replica < num_users % replicas)
            deck, (engine, clock) = self._deck(replica), self._engine(policy, users)
            answers = min(self.config.requests / replicas, self.config.requests_per_user * users)
            num_tokens = int(answers * self._answer_length())
            found.append(
                run_closed(engine, deck, num_users=users, num_tokens=num_tokens, clock=clock)
            )
        return SimulatedPoint.of(found)

    def open(self, policy: str, rate: float) -> SimulatedPoint:
        replicas = self.config.replicas
        found = []
        for replica in range(replicas):
            engine, clock = self._engine(policy, self.config.max_requests)
            arrivals = poisson(self._deck(replica), rate=rate / replicas)
            seconds = self.config.requests / rate
            found.append(run_open(engine, arrivals, seconds=seconds, clock=clock))
        return SimulatedPoint.of(found)

    def traced(self, policy: str, trace: Sequence[TracedRequest]) -> SimulatedPoint:
        """The whole trace until its last answer, replicas in turn."""
        found = []
        for replica in range(self.config.replicas):
            engine, clock = self._engine(policy, self.config.max_requests)
            part = trace[replica :: self.config.replicas]
            arrivals = self._arrivals(part, self._deck(replica))
            found.append(
                run_open(engine, arrivals, seconds=float("inf"), clock=clock, warm_share=0.0)
            )
        return SimulatedPoint.of([measured for measured in found if measured.num_steps])

    def _arrivals(self, trace: Sequence[TracedRequest], deck: Deck) -> Iterator[Arrival]:
        """Recorded answers for the requests of a trace, with the lengths that it tells."""
        for request, ask in zip(trace, deck.deal(), strict=False):
            prompt_ids, params = ask.prompt_ids, ask.params
            if request.num_prompt_tokens is not None:
                prompt_ids = [prompt_ids[0]] * request.num_prompt_tokens
            if request.num_answer_tokens is not None:
                params = replace(params, max_tokens=request.num_answer_tokens, ignore_eos=True)
            ask = Ask(domain=ask.domain, prompt_ids=prompt_ids, params=params)
            yield Arrival(at_s=request.arrival_s, ask=ask)

    def _deck(self, replica: int) -> Deck:
        return Deck(
            tasks=tasks_of(self.machine.recording),
            temperature=self.machine.recording.temperature,
            max_new_tokens=self.config.max_new_tokens,
            coupling=Coupling.MAXIMAL,
            seed=self.config.seed + replica,
        )

    def _engine(self, policy: str, max_requests: int) -> tuple[SimulatedEngine, SimulatedClock]:
        clock = SimulatedClock()
        engine = SimulatedEngine(
            self.machine.recording,
            cost=self.machine.cost,
            planner=self.machine.planner(policy),
            sizes=Sizes(max_requests=max_requests, max_step_tokens=self.config.max_step_tokens),
            clock=clock,
        )
        return engine, clock

    def _answer_length(self) -> int:
        lengths = [min(a.num_tokens, self.config.max_new_tokens)
                   for a in self.machine.recording.answers]  # fmt: skip
        return max(sum(lengths) // len(lengths), 1)
