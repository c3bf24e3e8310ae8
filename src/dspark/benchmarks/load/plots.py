"""PNG pictures of a load sweep, after Figures 7 and 8 of the paper. It computes no figure.

matplotlib is needed here and in `benchmarks.plots`, nowhere else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.benchmarks.load.config import AUTO
from dspark.benchmarks.load.report import LoadPoint, LoadReport, LoadRun
from dspark.benchmarks.plots import new_figure, require_matplotlib, save_pictures


def save_load_plots(report: LoadReport, folder: Path) -> list[Path]:
    """Frontier and budget of each temperature; their paths.

    Raises `InputError` where matplotlib is not installed.
    """
    require_matplotlib()
    pictures = {}
    for run in report.runs:
        if run.policies:
            pictures[f"load-frontier-t{run.temperature:g}"] = _frontier(run)
            pictures[f"load-budget-t{run.temperature:g}"] = _budget(run)
    return save_pictures(pictures, folder)


def _frontier(run: LoadRun) -> Any:
    """Figure 7: throughput of all against the speed of one, one curve a policy."""
    figure, (axis,) = new_figure(1, height=3.8)
    for policy, points in run.policies.items():
        is_auto = policy == AUTO
        axis.plot(
            [p.per_user_tokens_per_s for p in points.values()],
            [p.tokens_per_s for p in points.values()],
            marker="o",
            linewidth=2.5 if is_auto else 1.0,
            label=policy,
        )
    axis.set(xlabel="tokens/s of one user", ylabel="tokens/s of all users")
    axis.set_title(f"throughput and interactivity, T={run.temperature:g}")
    axis.legend(fontsize="small")
    return figure


def _budget(run: LoadRun) -> Any:
    """Figure 8: drafted tokens verified a request against the load, whole and by domain."""
    figure, (whole, by_domain) = new_figure(2, height=3.6)
    for policy, points in run.policies.items():
        _line(whole, points, {load: p.budget_per_request for load, p in points.items()}, policy)
    policy = AUTO if AUTO in run.policies else next(iter(run.policies))
    points = run.policies[policy]
    for domain in dict.fromkeys(d for p in points.values() for d in p.budget_by_domain):
        values = {load: p.budget_by_domain.get(domain) for load, p in points.items()}
        _line(by_domain, points, values, domain)
    whole.set(title="all domains", ylabel="drafted tokens verified a request and step")
    by_domain.set(title=policy)
    for axis in (whole, by_domain):
        axis.set(xlabel="users", xscale="log")
        axis.legend(fontsize="small")
    figure.suptitle(f"budget and load, T={run.temperature:g}")
    return figure


def _line(
    axis: Any, points: Mapping[str, LoadPoint], values: Mapping[str, float | None], label: str
) -> None:
    known = {load: value for load in points if (value := values[load]) is not None}
    axis.plot([float(load) for load in known], list(known.values()), marker="o", label=label)
