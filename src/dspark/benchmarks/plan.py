"""`dspark bench plan`: what planning costs, beside a real step of as many requests.

It times the engine's own planner in service, without an engine: what it decides before a block is
drawn (`caps`), what it chooses of the block (`plan`), and what it learns behind it (`observe`).
Medians are of a usual step; means hold the steps in which it decides anew and learns.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.policies import Adaptive
from dspark.algorithms.step_cost import ContextCost, StepCost, VerifyRow
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.passes import Passes
from dspark.core import SamplingParams
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.planner import Outcome, Outlook
from dspark.errors import InputError
from dspark.models.target import Target

_CONTEXT_TOKEN = 11  # any id: the cost does not depend on the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How large the plan is, and how often it is timed."""

    requests: int = 256
    """Requests of the step."""
    block_size: int = 7
    """Drafted tokens of each request."""
    repeats: int = 2000
    """Timed plans, each of other confidences; the median counts."""
    context: int = 32
    """Positions of each request in the step beside it: few, so that the share is not flattered."""

    def __post_init__(self) -> None:
        for name in ("requests", "block_size", "repeats", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """Microseconds of one step's planning."""

    median_us: float
    """Before the block and behind it."""
    p99_us: float
    mean_us: float
    """Of all, learning included."""
    caps_us: float
    """Medians of the parts."""
    plan_us: float
    observe_us: float

    @classmethod
    def of(cls, caps: Sequence[float], plans: Sequence[float], learns: Sequence[float]) -> Self:
        """From microseconds of each step."""
        both = [c + p for c, p in zip(caps, plans, strict=True)]
        return cls(
            median_us=statistics.median(both),
            p99_us=float(np.percentile(both, 99)),
            mean_us=statistics.fmean(both) + statistics.fmean(learns),
            caps_us=statistics.median(caps),
            plan_us=statistics.median(plans),
            observe_us=statistics.median(learns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Times of one plan and of one step, and what part the plan would be."""

    requests: int
    block_size: int
    median_us: float
    p99_us: float
    step_ms: float
    """A target pass over one token of each request: no step of so many requests is quicker."""
    share_of_step: float
    one_request_us: float
    one_request_step_ms: float
    one_request_share: float
    many: PlanTimes
    one: PlanTimes
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(target: Target, *, config: PlanConfig) -> PlanReport:
    """Plans of `config.requests` and of one request, beside the target's passes."""
    many = plan_times(config, num_requests=config.requests)
    one = plan_times(config, num_requests=1)
    passes = Passes(target, num_requests=config.requests, num_positions=config.context + 1)
    passes.fill(seed=0)

    def step_ms(num_requests: int) -> float:
        rows = [[_CONTEXT_TOKEN]] * num_requests
        return 1e3 * _median_s(lambda: passes.run(rows, start=config.context))

    many_ms, one_ms = step_ms(config.requests), step_ms(1)
    return PlanReport(
        requests=config.requests,
        block_size=config.block_size,
        median_us=many.median_us,
        p99_us=many.p99_us,
        step_ms=many_ms,
        share_of_step=many.median_us / 1e3 / many_ms,
        one_request_us=one.median_us,
        one_request_step_ms=one_ms,
        one_request_share=one.median_us / 1e3 / one_ms,
        many=many,
        one=one,
        environment=Environment.here(),
    )


def plan_times(config: PlanConfig, *, num_requests: int) -> PlanTimes:
    """`config.repeats` steps of the engine's planner, all of different confidences.

    Everybody drafts: the drafter costs little, and its tokens survive as it says.
    """
    rng = np.random.default_rng(0)
    shape = (num_requests, config.block_size)
    planner = AdaptivePlanner(
        Adaptive(), block_size=config.block_size, cost=_staircase(num_requests, config.block_size)
    )
    params = SamplingParams(seed=1)
    for slot in range(num_requests):
        planner.begin(slot, params, slot)
    times: list[tuple[float, float, float]] = []
    for step in range(config.repeats):
        outlook = Outlook(
            slots=list(range(num_requests)),
            rounds=[step] * num_requests,
            max_widths=[config.block_size] * num_requests,
            num_prompt_tokens=0,
            num_certain=num_requests,
            context=(200 + step // 100) * num_requests,
        )
        logits_RK = rng.normal(3.0, 1.0, shape).astype(np.float32)
        is_kept_RK = rng.random(shape) < 1.0 / (1.0 + np.exp(-logits_RK))
        reached_R = is_kept_RK.cumprod(1).sum(1)
        moments = [time.perf_counter()]
        caps = planner.caps(outlook)
        moments.append(time.perf_counter())
        lengths: Sequence[int] = [0] * num_requests
        if any(caps):
            lengths = planner.plan(logits_RK, caps).lengths
        moments.append(time.perf_counter())
        outcome = Outcome(
            verified=lengths,
            accepted=np.minimum(reached_R, lengths).tolist(),
            num_prompt_tokens=0,
            draft_seconds=None,
            verify_seconds=None,
        )
        before = time.perf_counter()
        planner.observe(outcome)
        learnt = time.perf_counter() - before
        times.append((moments[1] - moments[0], moments[2] - moments[1], learnt))
    caps_us, plans_us, learns_us = (1e6 * np.array(times).T).tolist()
    return PlanTimes.of(caps_us, plans_us, learns_us)


def _staircase(num_requests: int, block_size: int) -> StepCost:
    """A table as a profile gives it: a ladder of requests, sixteen sizes each, with shelves."""
    rows = []
    for requests in sorted({1, 2, 4, 8, 16, 32, 64, 128, num_requests}):
        sizes = np.unique(np.linspace(requests, requests * (block_size + 1), 16).astype(int))
        seconds = 0.02 + 2e-4 * requests + 3e-4 * (-(-sizes // 16) * 16)
        rows.append(VerifyRow(num_requests=requests, curve=_curve(sizes, seconds)))
    ladder = np.array([row.num_requests for row in rows])
    return StepCost(
        fingerprint=Fingerprint.of(source="synthetic"),
        block_size=block_size,
        context=256,
        draft=_curve(ladder, 5e-3 + 2e-4 * ladder),
        verify=tuple(rows),
        context_cost=ContextCost(held=1e-8, attended=1e-9, draft_held=1e-9),
    )


def _curve(sizes: np.ndarray, seconds: np.ndarray) -> CostCurve:
    return CostCurve(
        sizes=tuple(int(size) for size in sizes),
        seconds=tuple(float(value) for value in seconds),
        errors=(0.0,) * len(sizes),
    )


def _median_s(run: Callable[[], object], *, warmup: int = 3, repeats: int = 9) -> float:
    samples = []
    for index in range(warmup + repeats):
        started = time.perf_counter()
        run()
        if index >= warmup:
            samples.append(time.perf_counter() - started)
    return statistics.median(samples)
