"""PNG pictures of evaluations and calibrations, after Figures 2 to 6 of the paper.

It computes no figure of its own.

matplotlib is needed here and nowhere else.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.benchmarks.calibration import CalibrationReport
from dspark.benchmarks.evaluation_report import (
    DrafterReport,
    EvaluationReport,
    TemperatureReport,
)
from dspark.errors import InputError


def save_plots(report: EvaluationReport, folder: Path) -> list[Path]:
    """Write the pictures that the report has something for; their paths.

    Raises `InputError` where matplotlib is not installed.
    """
    require_matplotlib()
    pictures: dict[str, Any] = {}
    for run in report.runs:
        end = f"-t{run.temperature:g}"
        pictures[f"conditional-acceptance{end}"] = _conditional(run)
        pictures[f"thresholds{end}"] = _thresholds(run)
        pictures[f"depth{end}"] = _against(run, "layers", lambda d: d.shape.layers)
        pictures[f"block-size{end}"] = _against(
            run, "tokens verified in a round", lambda d: d.shape.width
        )
        for name, drafter in run.drafters.items():
            if drafter.positions:
                key = re.sub(r"[^\w.-]+", "-", name)
                pictures[f"reliability-{key}{end}"] = _reliability(name, drafter, run.temperature)
    return save_pictures(pictures, folder)


def save_pictures(pictures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write each figure under its name, `None` left out; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in pictures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def require_matplotlib() -> None:
    """Raises `InputError` with the remedy where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "Plots need matplotlib, which is not installed; run: pip install matplotlib"
        ) from error


def new_figure(columns: int, *, height: float = 3.2) -> tuple[Any, Sequence[Any]]:
    """An empty picture of `columns` panels side by side, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(axes)


def _conditional(run: TemperatureReport) -> Any:
    """Figure 2: conditional acceptance by position, one panel a task."""
    tasks = _tasks(run)
    figure, axes = new_figure(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for name, drafter in run.drafters.items():
            points = [
                (k, share)
                for k, share in enumerate(drafter.tasks[task].conditional, start=1)
                if share is not None
            ]
            axis.plot(*_columns(points), marker="o", label=name)
        axis.set(title=task, xlabel="position", ylim=(0, 1))
    axes[0].set_ylabel("accepted, given all before")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"conditional acceptance, T={run.temperature:g}")
    return figure


def _thresholds(run: TemperatureReport) -> Any:
    """Figure 5: accepted length and acceptance against a confidence threshold, one panel a task."""
    drafters = {
        k: d for k, d in run.drafters.items() if any(t.thresholds for t in d.tasks.values())
    }
    if not drafters:
        return None
    tasks = _tasks(run)
    figure, axes = new_figure(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        right = axis.twinx()
        for name, drafter in drafters.items():
            points = drafter.tasks[task].thresholds
            thresholds = [point.threshold for point in points]
            (line,) = axis.plot(thresholds, [p.tau for p in points], marker="o", label=name)
            shares = [p.acceptance_planned for p in points]
            seen = [
                (t, share) for t, share in zip(thresholds, shares, strict=True) if share is not None
            ]
            right.plot(*_columns(seen), linestyle="--", color=line.get_color())
        axis.set(title=task, xlabel="confidence threshold")
        right.set_ylim(0, 1)
    axes[0].set_ylabel("tau (solid); accepted/planned (dashed)")
    axes[0].legend(fontsize="small")
    figure.suptitle(f"confidence threshold, replayed, T={run.temperature:g}")
    return figure


def _against(
    run: TemperatureReport, label: str, value_of: Callable[[DrafterReport], int | None]
) -> Any:
    """Figures 3 and 4: mean tau against one property; `None` unless it takes two values."""
    points: Mapping[str, tuple[int, float]] = {
        name: (value, drafter.macro_tau)
        for name, drafter in run.drafters.items()
        if (value := value_of(drafter)) is not None
    }
    if len({value for value, _ in points.values()}) < 2:
        return None
    figure, (axis,) = new_figure(1)
    for name, (value, tau) in points.items():
        axis.plot([value], [tau], marker="o", linestyle="", label=name)
    axis.set(xlabel=label, ylabel="mean tau", title=f"T={run.temperature:g}")
    axis.legend(fontsize="small")
    return figure


def _reliability(name: str, drafter: DrafterReport, temperature: float) -> Any:
    """Figure 6: foretold and measured survival, one panel a position."""
    figure, axes = new_figure(len(drafter.positions))
    for axis, position in zip(axes, drafter.positions, strict=True):
        axis.plot([0, 1], [0, 1], linestyle=":", color="grey")
        axis.bar(
            [b.low for b in position.bins],
            [b.share_accepted for b in position.bins],
            width=[b.high - b.low for b in position.bins],
            align="edge",
            alpha=0.5,
        )
        axis.plot(*_columns([(b.mean_predicted, b.share_accepted) for b in position.bins]), "o")
        found = position.calibration
        axis.set(title=f"position {found.k}, ECE {found.ece:.3f}", xlabel="foretold", ylim=(0, 1))
    axes[0].set_ylabel("accepted")
    figure.suptitle(f"{name}, T={temperature:g}, before calibration")
    return figure


def save_calibration(report: CalibrationReport, folder: Path) -> list[Path]:
    """Figure 6 for every class of requests, before and after; the paths.

    Raises `InputError` where matplotlib is not installed.
    """
    require_matplotlib()
    pictures = {}
    for found in report.classes:
        figure, axes = new_figure(len(found.positions))
        for axis, position in zip(axes, found.positions, strict=True):
            axis.plot([0, 1], [0, 1], linestyle=":", color="grey")
            for label, bins in (("before", position.bins_before), ("after", position.bins_after)):
                points = [(b.mean_predicted, b.share_accepted) for b in bins]
                axis.plot(*_columns(points), marker="o", label=label)
            errors = f"{position.ece_before:.3f} to {position.ece_after:.3f}"
            axis.set(title=f"position {position.k}, ECE {errors}", xlabel="foretold", ylim=(0, 1))
        axes[0].set_ylabel("accepted")
        axes[0].legend(fontsize="small")
        figure.suptitle(f"survival, T={found.temperature:g}, {found.rounds} rounds")
        pictures[f"calibration-{found.sampling_class}"] = figure
    return save_pictures(pictures, folder)


def _tasks(run: TemperatureReport) -> list[str]:
    return list(next(iter(run.drafters.values())).tasks)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
