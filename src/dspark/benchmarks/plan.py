"""`dspark bench plan`: what choosing a budget costs, beside a real step of as many requests.

It times the pure part of a plan as an engine runs it once a step: prices from a table, the
budget from earlier survivals, calibrated survivals of a new block, admission, lengths as numbers.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark.algorithms.calibration import Scaling
from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.prefix_scheduler import Limits, admit, choose_budget
from dspark.algorithms.step_cost import ContextCost, StepCost, VerifyRow
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.passes import Passes
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
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(target: Target, *, config: PlanConfig) -> PlanReport:
    """Plans of `config.requests` and of one request, beside the target's passes."""
    many_us = plan_times(config, num_requests=config.requests)
    one_us = plan_times(config, num_requests=1)
    passes = Passes(target, num_requests=config.requests, num_positions=config.context + 1)
    passes.fill(seed=0)

    def step_ms(num_requests: int) -> float:
        rows = [[_CONTEXT_TOKEN]] * num_requests
        return 1e3 * _median_s(lambda: passes.run(rows, start=config.context))

    many_ms, one_ms = step_ms(config.requests), step_ms(1)
    median_us = statistics.median(many_us)
    return PlanReport(
        requests=config.requests,
        block_size=config.block_size,
        median_us=median_us,
        p99_us=float(np.percentile(many_us, 99)),
        step_ms=many_ms,
        share_of_step=median_us / 1e3 / many_ms,
        one_request_us=statistics.median(one_us),
        one_request_step_ms=one_ms,
        one_request_share=statistics.median(one_us) / 1e3 / one_ms,
        environment=Environment.here(),
    )


def plan_times(config: PlanConfig, *, num_requests: int) -> list[float]:
    """Microseconds of each of `config.repeats` plans, all of different confidences."""
    rng = np.random.default_rng(0)
    shape = (num_requests, config.block_size)
    cost = _staircase(num_requests, config.block_size)
    scaling = Scaling.of_temperatures([1.5] * config.block_size)
    limits = Limits(caps_R=np.full(num_requests, config.block_size))
    history_RK = scaling.survival(rng.normal(1.0, 1.5, shape).astype(np.float32))
    times, budget = [], 0
    for _ in range(config.repeats):
        logits_RK = rng.normal(1.0, 1.5, shape).astype(np.float32)
        started = time.perf_counter()
        prices = cost.prices(
            num_requests=num_requests,
            num_drafting=num_requests,
            num_prompt_tokens=0,
            num_certain=num_requests,
            context=200 * num_requests,
            most=num_requests * config.block_size,
            is_drafted=False,
        )
        choice = choose_budget(history_RK, prices, limits, incumbent=budget, margin=0.02)
        survival_RK = scaling.survival(logits_RK)
        admit(survival_RK, choice, limits.caps_R).tolist()
        times.append(1e6 * (time.perf_counter() - started))
        history_RK, budget = survival_RK, choice.budget
    return times


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
