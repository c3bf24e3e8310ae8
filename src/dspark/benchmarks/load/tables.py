"""A load report as a person reads it: the four answers, the claims, then the tables.

It computes no figure.
"""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from dspark.benchmarks.load.answers import answers, claims
from dspark.benchmarks.load.report import LoadPoint, LoadReport


def print_load(console: Console, report: LoadReport) -> None:
    """Words first, then a row for every policy and load."""
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(
        f"{report.target}, {report.dtype}, quantization {report.quantization or 'none'}, keys and "
        f"values {report.kv_cache_dtype}, block of "
        f"{report.block_size}; {report.num_prompts} prompts, answers of at most "
        f"{report.max_new_tokens} tokens",
        style="dim",
        highlight=False,
    )
    for run in report.runs:
        console.rule(f"T={run.temperature:g}")
        for sentence in (*answers(run), *claims(run)):
            console.print(sentence, highlight=False)
        if run.policies:
            console.print(_table("users", run.policies))
        if run.open_loads:
            console.print(_table("requests/s", run.open_loads))
    if not report.is_complete:
        console.print("Time was up before all was measured; the same command goes on.", style="red")


def _table(load_title: str, policies: Mapping[str, Mapping[str, LoadPoint]]) -> Table:
    is_open = any(p.ttft_ms for by_load in policies.values() for p in by_load.values())
    is_predicted = any(
        p.predicted_tokens_per_s is not None
        for by_load in policies.values()
        for p in by_load.values()
    )
    table = Table(pad_edge=False)
    table.add_column("policy")
    names = [load_title, "n", "tokens/s", "a user", "step, ms", "tau", "budget", "drafts"]
    for name in (*names, *(["foretold"] * is_predicted), *(["ttft, ms"] * is_open)):
        table.add_column(name, justify="right")
    for policy, by_load in policies.items():
        for load, p in by_load.items():
            cells = [
                policy,
                load,
                str(p.repeats),
                f"{p.tokens_per_s:.1f}",
                f"{p.per_user_tokens_per_s:.1f}",
                f"{p.step_ms:.1f}",
                _number(p.tau),
                _number(p.budget_per_request),
                _share(p.drafting_share),
            ]
            if is_predicted:
                predicted = p.predicted_tokens_per_s
                cells.append("-" if predicted is None else f"{predicted:.1f}")
            if is_open:
                waits = p.ttft_ms or {}
                cells.append("/".join(f"{waits[k]:.0f}" for k in ("p50", "p99") if k in waits))
            table.add_row(*cells)
        table.add_section()
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
