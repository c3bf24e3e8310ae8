"""From the rounds of an evaluation to its figures, by the definitions of method section 8.

It runs nothing and prints nothing. A token that was not verified is never a rejection.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.algorithms.bootstrap import (
    Interval,
    mean_ratio_interval,
    ratio_interval,
    speed_ratio_interval,
)
from dspark.algorithms.calibration_metrics import (
    PositionCalibration,
    ReliabilityBin,
    calibration_by_position,
    mean_ece,
    reliability,
)
from dspark.algorithms.survival import AcceptanceStats, mean_tau
from dspark.algorithms.threshold_sweep import ThresholdPoint, sweep
from dspark.benchmarks.journal import PLAIN, PromptRecord, confidence_rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One drafter on one task; shares are between 0 and 1."""

    num_prompts: int
    num_rounds: int
    num_truncated: int
    """Answers that a limit cut."""
    tau: float
    """Committed over rounds, all rounds of all prompts (the first token, which no round
    drafted, left out)."""
    tau_ci95: float
    """Half the width of `tau_interval`."""
    tau_interval: Interval | None
    """95%, by drawing prompts again; `None` with one prompt."""
    mean_prompt_tau: float
    """Mean of the prompts' own tau, each prompt weighing the same."""
    acceptance_planned: float
    acceptance_offered: float
    accepted_per_round: float
    planned_per_round: float
    conditional: Sequence[float | None]
    """At k: accepted among the rounds that accepted 1..k-1 and verified k; `None`: never seen."""
    survival: Sequence[float | None]
    """At k: accepted among the rounds that verified k."""
    tokens_per_s: float
    """All answers of the task over wall-clock, `batch_size` prompts at a time."""
    speedup: float | None
    """Over plain decoding of the same prompts; `None` where that was not measured."""
    speedup_interval: Interval | None
    ece: float | None
    """Of the survival before calibration, mean over positions; `None` without confidences."""
    auroc: float | None
    brier: float | None
    thresholds: Sequence[ThresholdPoint]
    """What a confidence threshold would have kept; empty without confidences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionReport:
    """How the survival at one position was foretold, all tasks together."""

    calibration: PositionCalibration
    bins: Sequence[ReliabilityBin]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """What the effect of depth and block size is read from."""

    kind: str
    layers: int | None
    """`None` for a drafter without layers."""
    block_size: int
    width: int
    """Drafted tokens verified in a round, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReport:
    """One drafter at one width over all tasks."""

    macro_tau: float
    """Mean of the tasks' tau, each task weighing the same."""
    macro_tau_interval: Interval | None
    shape: DrafterShape
    mean_ece: float | None
    positions: Sequence[PositionReport]
    tasks: Mapping[str, TaskReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureReport:
    """All drafters at one temperature."""

    temperature: float
    drafters: Mapping[str, DrafterReport]
    plain_tokens_per_s: Mapping[str, float]
    """By task; empty where plain decoding was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The whole run, one part for each temperature."""

    runs: Sequence[TemperatureReport]

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line: the first temperature's by themselves, all in `runs`."""
        runs = [asdict(run) for run in self.runs]
        return {**runs[0], "runs": runs}


def report_of(
    records: Sequence[PromptRecord], shapes: Mapping[str, DrafterShape]
) -> EvaluationReport:
    """The figures of what was measured; `shapes` by the drafter's name."""
    temperatures = list(dict.fromkeys(record.cell.temperature for record in records))
    return EvaluationReport(
        runs=[
            _temperature(t, [r for r in records if r.cell.temperature == t], shapes)
            for t in temperatures
        ]
    )


def _temperature(
    temperature: float, records: Sequence[PromptRecord], shapes: Mapping[str, DrafterShape]
) -> TemperatureReport:
    plain = _by_task([record for record in records if record.cell.drafter == PLAIN])
    drafted = [record for record in records if record.cell.drafter != PLAIN]
    runs = list(dict.fromkeys((record.cell.drafter, record.cell.width) for record in drafted))
    drafters = {}
    for name, width in runs:
        found = [r for r in drafted if (r.cell.drafter, r.cell.width) == (name, width)]
        key = name if width is None else f"{name}, width {width}"
        drafters[key] = _drafter(_by_task(found), plain, shapes[name], width)
    return TemperatureReport(
        temperature=temperature,
        drafters=drafters,
        plain_tokens_per_s={task: _speed(rows) for task, rows in plain.items()},
    )


def _drafter(
    tasks: Mapping[str, Sequence[PromptRecord]],
    plain: Mapping[str, Sequence[PromptRecord]],
    shape: DrafterShape,
    width: int | None,
) -> DrafterReport:
    reports = {task: _task(rows, plain.get(task, ())) for task, rows in tasks.items()}
    positions = _positions([record for rows in tasks.values() for record in rows])
    return DrafterReport(
        macro_tau=statistics.fmean(task.tau for task in reports.values()),
        macro_tau_interval=mean_ratio_interval([_counts(rows) for rows in tasks.values()]),
        shape=DrafterShape(
            kind=shape.kind,
            layers=shape.layers,
            block_size=shape.block_size,
            width=shape.block_size if width is None else min(width, shape.block_size),
        ),
        mean_ece=mean_ece([position.calibration for position in positions]),
        positions=positions,
        tasks=reports,
    )


def _positions(records: Sequence[PromptRecord]) -> list[PositionReport]:
    rounds = confidence_rounds(records)
    if rounds is None:
        return []
    return [
        PositionReport(calibration=found, bins=reliability(*rounds.survival_at(found.k)))
        for found in calibration_by_position(rounds)
    ]


def _task(records: Sequence[PromptRecord], plain: Sequence[PromptRecord]) -> TaskReport:
    each = [record.stats for record in records]
    total = sum(each, AcceptanceStats())
    interval = ratio_interval(*_counts(records))
    rounds = confidence_rounds(records)
    positions = [] if rounds is None else calibration_by_position(rounds)
    aurocs = [position.auroc for position in positions if position.auroc is not None]
    return TaskReport(
        num_prompts=len(records),
        num_rounds=total.num_rounds,
        num_truncated=sum(record.is_truncated for record in records),
        tau=total.tau or 1.0,
        tau_ci95=0.0 if interval is None else interval.half_width,
        tau_interval=interval,
        mean_prompt_tau=mean_tau(each) or 1.0,
        acceptance_planned=total.acceptance_planned or 0.0,
        acceptance_offered=total.acceptance_offered or 0.0,
        accepted_per_round=total.accepted_per_round or 0.0,
        planned_per_round=total.num_planned / max(total.num_rounds, 1),
        conditional=total.conditional_acceptance,
        survival=total.position_acceptance,
        tokens_per_s=_speed(records),
        speedup=_speed(records) / _speed(plain) if plain else None,
        speedup_interval=_speedup_interval(records, plain) if plain else None,
        ece=mean_ece(positions),
        auroc=statistics.fmean(aurocs) if aurocs else None,
        brier=statistics.fmean(p.brier for p in positions) if positions else None,
        thresholds=[] if rounds is None else sweep(rounds),
    )


def _by_task(records: Sequence[PromptRecord]) -> dict[str, list[PromptRecord]]:
    tasks: dict[str, list[PromptRecord]] = {}
    for record in records:
        tasks.setdefault(record.cell.task, []).append(record)
    return tasks


def _counts(records: Sequence[PromptRecord]) -> tuple[list[float], list[float]]:
    """Committed tokens and rounds of the prompts that had a round at all."""
    each = [record.stats for record in records]
    kept = [stats for stats in each if stats.num_rounds]
    return [float(s.num_committed) for s in kept], [float(s.num_rounds) for s in kept]


def _speed(records: Sequence[PromptRecord]) -> float:
    return sum(record.num_tokens for record in records) / sum(record.seconds for record in records)


def _speedup_interval(
    records: Sequence[PromptRecord], plain: Sequence[PromptRecord]
) -> Interval | None:
    other = {record.index: record for record in plain}
    both = [(record, other[record.index]) for record in records if record.index in other]
    return speed_ratio_interval(
        [one.num_tokens for one, _ in both],
        [one.seconds for one, _ in both],
        [two.num_tokens for _, two in both],
        [two.seconds for _, two in both],
    )
