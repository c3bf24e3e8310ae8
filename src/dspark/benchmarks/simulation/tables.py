"""A simulation as a person reads it: whether it pays, then a row for every policy and load."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from dspark.benchmarks.load.config import AUTO, NONE
from dspark.benchmarks.simulation.simulate import SimulatedPoint, SimulationReport


def print_simulation(console: Console, report: SimulationReport) -> None:
    """The verdict first."""
    console.print(
        f"{report.answers} recorded answers at T={report.temperature:g}, block of "
        f"{report.block_size}",
        style="dim",
        highlight=False,
    )
    for title, policies in (("users", report.policies), ("requests/s", report.open_loads)):
        if any(policies.values()):
            _print_verdict(console, title, policies)
            console.print(_table(title, policies))
    if report.trace:
        console.print(_table("trace", {name: {"": p} for name, p in report.trace.items()}))


def _print_verdict(
    console: Console, title: str, policies: Mapping[str, Mapping[str, SimulatedPoint]]
) -> None:
    if AUTO not in policies or NONE not in policies:
        return
    gains = ", ".join(
        f"{load} {title}: x{point.tokens_per_s / policies[NONE][load].tokens_per_s:.2f}"
        for load, point in policies[AUTO].items()
    )
    console.print(f"auto over plain decoding, tokens/s of all: {gains}", highlight=False)


def _table(title: str, policies: Mapping[str, Mapping[str, SimulatedPoint]]) -> Table:
    table = Table(pad_edge=False)
    table.add_column("policy")
    for name in (title, "tokens/s", "a user", "step, ms", "tau", "budget", "drafted", "ttft, ms"):
        table.add_column(name, justify="right")
    for policy, points in policies.items():
        for load, p in points.items():
            table.add_row(
                policy,
                load,
                f"{p.tokens_per_s:.0f}",
                f"{p.per_user_tokens_per_s:.1f}",
                f"{p.step_ms:.2f}",
                "-" if p.tau is None else f"{p.tau:.2f}",
                "-" if p.budget_per_request is None else f"{p.budget_per_request:.2f}",
                "-" if p.drafting_share is None else f"{p.drafting_share:.0%}",
                "-" if p.ttft_ms is None else f"{p.ttft_ms:.0f}",
            )
        table.add_section()
    return table
