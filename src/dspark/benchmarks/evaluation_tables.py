"""An evaluation as a person reads it: the shape of the paper's Table 1, then what lies behind it.

It computes no figure.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dspark.algorithms.bootstrap import Interval
from dspark.benchmarks.evaluation_report import (
    DrafterReport,
    EvaluationReport,
    TaskReport,
    TemperatureReport,
)


def print_evaluation(console: Console, report: EvaluationReport) -> None:
    """Speed against plain decoding first where it was measured, then tau, then its reasons."""
    for run in report.runs:
        _print_speedups(console, run)
        console.print(_tau_table(run))
        for name, drafter in run.drafters.items():
            console.print(_task_table(name, drafter, run.temperature))
        if len(run.drafters) > 1:
            console.print(_shape_table(run))
        for name, drafter in run.drafters.items():
            if drafter.positions:
                console.print(_calibration_table(name, drafter, run.temperature))


def _print_speedups(console: Console, run: TemperatureReport) -> None:
    for name, drafter in run.drafters.items():
        measured = {k: task for k, task in drafter.tasks.items() if task.speedup is not None}
        if not measured:
            continue
        parts = [f"{task} x{_speedup(found)}" for task, found in measured.items()]
        console.print(
            f"{name}, T={run.temperature:g}, speed over plain decoding: {', '.join(parts)}",
            highlight=False,
        )
        slower = [task for task, found in measured.items() if (found.speedup or 0.0) < 1.0]
        if slower:
            console.print(
                f"Slower than plain decoding on {', '.join(slower)}: do not enable it there.",
                style="red",
                highlight=False,
            )


def _tau_table(run: TemperatureReport) -> Table:
    table = Table(title=f"tokens per round (tau), T={run.temperature:g}", pad_edge=False)
    table.add_column("drafter")
    tasks = list(dict.fromkeys(task for d in run.drafters.values() for task in d.tasks))
    for task in (*tasks, "mean"):
        table.add_column(task, justify="right")
    for name, drafter in run.drafters.items():
        cells = [_with_interval(drafter.tasks[t].tau, drafter.tasks[t].tau_interval) for t in tasks]
        table.add_row(name, *cells, _with_interval(drafter.macro_tau, drafter.macro_tau_interval))
    return table


def _task_table(name: str, drafter: DrafterReport, temperature: float) -> Table:
    table = Table(
        title=f"{name}, T={temperature:g}: accepted of what was drafted; "
        f"at most {drafter.shape.width} tokens verified a round",
        pad_edge=False,
    )
    table.add_column("task")
    for column in ("n", "tau", "of\nverified", "of\ndrafted"):
        table.add_column(column, justify="right")
    table.add_column("position after position", justify="right", no_wrap=True)
    table.add_column("tokens/s", justify="right")
    for task_name, task in drafter.tasks.items():
        table.add_row(
            task_name,
            str(task.num_prompts),
            f"{task.tau:.2f}",
            f"{task.acceptance_planned:.0%}",
            f"{task.acceptance_offered:.0%}",
            _shares(task.conditional),
            f"{task.tokens_per_s:.1f}",
        )
    return table


def _shape_table(run: TemperatureReport) -> Table:
    table = Table(title=f"depth and block size, T={run.temperature:g}", pad_edge=False)
    table.add_column("drafter")
    for column in ("kind", "layers", "block", "width", "mean tau", "tokens/s"):
        table.add_column(column, justify="right")
    for name, drafter in run.drafters.items():
        speeds = [task.tokens_per_s for task in drafter.tasks.values()]
        table.add_row(
            name,
            drafter.shape.kind,
            "-" if drafter.shape.layers is None else str(drafter.shape.layers),
            str(drafter.shape.block_size),
            str(drafter.shape.width),
            f"{drafter.macro_tau:.2f}",
            f"{sum(speeds) / len(speeds):.1f}",
        )
    return table


def _calibration_table(name: str, drafter: DrafterReport, temperature: float) -> Table:
    table = Table(
        title=f"{name}, T={temperature:g}: survival foretold, before calibration", pad_edge=False
    )
    for column in ("position", "n", "ECE", "ECE, equal mass", "AUROC", "Brier", "said", "was"):
        table.add_column(column, justify="right")
    for position in drafter.positions:
        found = position.calibration
        table.add_row(
            str(found.k),
            str(found.count),
            f"{found.ece:.3f}",
            f"{found.ece_mass:.3f}",
            "-" if found.auroc is None else f"{found.auroc:.3f}",
            f"{found.brier:.3f}",
            f"{found.mean_predicted:.2f}",
            f"{found.share_accepted:.2f}",
        )
    return table


def _with_interval(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} ± {interval.half_width:.2f}"


def _speedup(task: TaskReport) -> str:
    interval = task.speedup_interval
    if interval is None:
        return f"{task.speedup:.2f}"
    return f"{task.speedup:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _shares(values: Sequence[float | None]) -> str:
    texts = ("-" if value is None else f"{value:.2f}".removeprefix("0") for value in values)
    return " ".join(texts)
