"""What a load sweep says: medians, ratios with intervals, frontiers, budgets. It measures nothing.

Ratios compare the same repeat of two policies, which did the same work side by side.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dspark.algorithms.bootstrap import Interval, speed_ratio_interval
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.load.config import AUTO, MTP1, NONE, Load, LoadKind, Unit
from dspark.benchmarks.load.frontier import Gains, Point, gains
from dspark.benchmarks.load.tally import Counts, Measured

Repeats = Mapping[int, Measured]
"""By the number of the repeat."""
Grid = Mapping[str, Mapping[Load, Repeats]]
"""By policy and load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One policy under one load: medians of its repeats, and sums over them where said."""

    repeats: int
    tokens: int
    """Of all repeats: committed, first tokens of answers included."""
    prompt_tokens: int
    """Read beside them. Where two policies differ, they did different work."""
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    per_user_tokens_per_s: float
    step_ms: float
    """Of each repeat the median step."""
    mean_step_ms: float
    """Steps that read prompts, and pauses, count in full."""
    tau: float | None
    """Of the sum over repeats, as all that follow."""
    budget_per_request: float | None
    """Drafted tokens verified a round."""
    drafting_share: float | None
    """Share of rounds that drafted anything."""
    accepted_share: float | None
    """Share of the answer that was drafted."""
    in_flight: float
    tau_by_domain: Mapping[str, float | None]
    budget_by_domain: Mapping[str, float | None]
    ttft_ms: Mapping[str, float] | None
    """p50 and p99 of an open load."""
    predicted_tokens_per_s: float | None = None
    """What the simulator foretells from a profile and recorded rounds alone; the profile is taken
    in turns with a closed load."""
    live_predicted_tokens_per_s: float | None = None
    """The same from the profile of before as the steps of `auto` corrected it meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """One policy's throughput over another's under one load."""

    policy: str
    """The other one."""
    ratio: float
    """Median over the repeats of one over the other."""
    quartiles: tuple[float, float] | None
    """Between which the middle half of those ratios lies; `None` with less than two."""
    repeats: int
    """That both have."""
    interval: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """All policies at one temperature. Loads are keys by name: "8" users, "2.5" requests a second.

    What compares `auto` with others is `None` where one of them is missing.
    """

    temperature: float
    policies: Mapping[str, Mapping[str, LoadPoint]]
    open_loads: Mapping[str, Mapping[str, LoadPoint]]
    geometric_mean: Mapping[str, float]
    """Of tokens/s over the closed loads that every policy met."""
    auto_over_best: Mapping[str, Versus] | None
    """By closed load, the other policy beside which `auto` looks worst at that very load."""
    auto_over_plain: Mapping[str, Versus] | None
    best_single: str | None
    """The other policy with the highest geometric mean."""
    auto_over_best_single: float | None
    """Geometric mean over the closed loads of `auto` over it, each as in `auto_over_best`."""
    against_mtp1: Gains | None
    against_none: Gains | None
    largest_prediction_error: float | None
    largest_live_prediction_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The runs of a sweep by temperature."""

    target: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    block_size: int
    num_prompts: int
    max_new_tokens: int
    is_complete: bool
    """Whether every unit was measured; otherwise time was up."""
    runs: Sequence[LoadRun]
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line: the first temperature's figures stand at the top too."""
        head = asdict(self)
        runs = head.pop("runs")
        first = runs[0] if runs else {}
        return {**first, **head, "temperatures": {f"{run['temperature']:g}": run for run in runs}}


Prediction = Callable[[float, str, Load], float | None]
"""Tokens/s foretold for (temperature, policy, load)."""


def runs_of(
    units: Mapping[Unit, Measured],
    *,
    temperatures: Sequence[float],
    policies: Sequence[str],
    loads: Sequence[Load],
    predict: Prediction | None = None,
    predict_live: Prediction | None = None,
) -> list[LoadRun]:
    """The runs of what was measured, in the order of the three lists; see `LoadPoint` for what is
    foretold."""
    runs = []
    for temperature in temperatures:
        grid = {
            policy: {
                load: found
                for load in loads
                if (found := _repeats(units, temperature, policy, load))
            }
            for policy in policies
        }
        if any(grid.values()):
            met = {policy: by_load for policy, by_load in grid.items() if by_load}
            runs.append(_run(temperature, met, (predict, predict_live)))
    return runs


def _repeats(
    units: Mapping[Unit, Measured], temperature: float, policy: str, load: Load
) -> dict[int, Measured]:
    return {
        unit.repeat: measured
        for unit, measured in units.items()
        if (unit.temperature, unit.policy, unit.load) == (temperature, policy, load)
    }


def _run(
    temperature: float, grid: Grid, predictions: tuple[Prediction | None, Prediction | None]
) -> LoadRun:
    points = {
        policy: {
            load: _point(
                list(repeats.values()),
                [
                    None if predict is None else predict(temperature, policy, load)
                    for predict in predictions
                ],
            )
            for load, repeats in by_load.items()
        }
        for policy, by_load in grid.items()
    }
    closed = {
        policy: {load: p for load, p in by_load.items() if load.kind is LoadKind.CLOSED}
        for policy, by_load in points.items()
    }
    means = _geometric_means(closed)
    others = {policy: mean for policy, mean in means.items() if policy != AUTO}
    best_single = max(others, key=others.__getitem__) if others else None
    over_best_single = None if best_single is None else _over(grid, closed, best_single)
    return LoadRun(
        temperature=temperature,
        policies=_named(closed),
        open_loads=_named(
            {
                policy: {load: p for load, p in by_load.items() if load.kind is LoadKind.OPEN}
                for policy, by_load in points.items()
            }
        ),
        geometric_mean=means,
        auto_over_best=_over_best(grid, closed),
        auto_over_plain=_over(grid, closed, NONE),
        best_single=best_single,
        auto_over_best_single=_mean_ratio(over_best_single),
        against_mtp1=_gains(closed, MTP1),
        against_none=_gains(closed, NONE),
        largest_prediction_error=_largest_error(points, lambda p: p.predicted_tokens_per_s),
        largest_live_prediction_error=_largest_error(
            points, lambda p: p.live_predicted_tokens_per_s
        ),
    )


def _point(repeats: Sequence[Measured], predicted: Sequence[float | None]) -> LoadPoint:
    rates = [m.tokens_per_s for m in repeats]
    domains: dict[str, Counts] = {}
    for measured in repeats:
        for domain, counts in measured.domains.items():
            domains[domain] = domains.get(domain, Counts()) + counts
    total = sum(domains.values(), Counts())
    waits_ms = [1e3 * wait for m in repeats for wait in m.ttft_s]
    return LoadPoint(
        repeats=len(repeats),
        tokens=sum(m.tokens for m in repeats),
        prompt_tokens=sum(m.prompt_tokens for m in repeats),
        tokens_per_s=statistics.median(rates),
        tokens_per_s_min=min(rates),
        tokens_per_s_max=max(rates),
        per_user_tokens_per_s=statistics.median(m.per_user_tokens_per_s for m in repeats),
        step_ms=1e3 * statistics.median(m.step_s for m in repeats),
        mean_step_ms=1e3 * statistics.median(m.seconds / max(m.num_steps, 1) for m in repeats),
        tau=total.tau,
        budget_per_request=total.budget_per_request,
        drafting_share=total.drafting_share,
        accepted_share=total.accepted_share,
        in_flight=statistics.median(m.in_flight for m in repeats),
        tau_by_domain={name: counts.tau for name, counts in domains.items()},
        budget_by_domain={name: counts.budget_per_request for name, counts in domains.items()},
        ttft_ms={
            "p50": float(np.percentile(waits_ms, 50)),
            "p99": float(np.percentile(waits_ms, 99)),
        }
        if waits_ms
        else None,
        predicted_tokens_per_s=predicted[0],
        live_predicted_tokens_per_s=predicted[1],
    )


def versus(ours: Repeats, theirs: Repeats, *, policy: str) -> Versus | None:
    """Our throughput over theirs, repeat by repeat; `None` where no repeat has both."""
    pairs = [(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return None
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs]
    quartiles = None
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        quartiles = low, high
    return Versus(
        policy=policy,
        ratio=statistics.median(ratios),
        quartiles=quartiles,
        repeats=len(pairs),
        interval=speed_ratio_interval(
            [a.tokens for a, _ in pairs],
            [a.seconds for a, _ in pairs],
            [b.tokens for _, b in pairs],
            [b.seconds for _, b in pairs],
        ),
    )


def _over_best(
    grid: Grid, closed: Mapping[str, Mapping[Load, LoadPoint]]
) -> dict[str, Versus] | None:
    """`auto` over the other policy that does best beside it in the same repeats, at each load."""
    if AUTO not in closed or len(closed) < 2:
        return None
    others = [_over(grid, closed, policy) or {} for policy in closed if policy != AUTO]
    return {
        load.name: min(found, key=lambda versus: versus.ratio)
        for load in closed[AUTO]
        if (found := [by_load[load.name] for by_load in others if load.name in by_load])
    }


def _over(
    grid: Grid, closed: Mapping[str, Mapping[Load, LoadPoint]], other: str
) -> dict[str, Versus] | None:
    if AUTO not in closed or other not in closed:
        return None
    return {
        load.name: found
        for load in closed[AUTO]
        if load in closed[other]
        and (found := versus(grid[AUTO][load], grid[other][load], policy=other)) is not None
    }


def _mean_ratio(by_load: Mapping[str, Versus] | None) -> float | None:
    """Geometric mean; `None` without any."""
    if not by_load:
        return None
    return math.exp(statistics.fmean(math.log(found.ratio) for found in by_load.values()))


def _geometric_means(closed: Mapping[str, Mapping[Load, LoadPoint]]) -> dict[str, float]:
    """Over the loads that all policies met."""
    common = set.intersection(*(set(by_load) for by_load in closed.values()))
    if not common:
        return {}
    return {
        policy: math.exp(
            statistics.fmean(math.log(max(by_load[load].tokens_per_s, 1e-9)) for load in common)
        )
        for policy, by_load in closed.items()
    }


def _gains(closed: Mapping[str, Mapping[Load, LoadPoint]], other: str) -> Gains | None:
    if not closed.get(AUTO) or not closed.get(other):
        return None
    ours, theirs = (
        [
            Point(tokens_per_s=p.tokens_per_s, per_user_tokens_per_s=p.per_user_tokens_per_s)
            for p in closed[policy].values()
        ]
        for policy in (AUTO, other)
    )
    return gains(ours, theirs)


def _largest_error(
    points: Mapping[str, Mapping[Load, LoadPoint]], foretold: Callable[[LoadPoint], float | None]
) -> float | None:
    errors = [
        abs(predicted / p.tokens_per_s - 1.0)
        for by_load in points.values()
        for p in by_load.values()
        if (predicted := foretold(p)) is not None and p.tokens_per_s > 0
    ]
    return max(errors) if errors else None


def _named(
    points: Mapping[str, Mapping[Load, LoadPoint]],
) -> dict[str, dict[str, LoadPoint]]:
    return {
        policy: {load.name: point for load, point in by_load.items()}
        for policy, by_load in points.items()
        if by_load
    }
