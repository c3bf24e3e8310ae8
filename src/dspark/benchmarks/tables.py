"""Reports as tables for people, each with a sentence that judges it; it measures nothing."""

from collections.abc import Mapping

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.calibration import CalibrationReport, table_rows
from dspark.benchmarks.cycle import CycleReport
from dspark.benchmarks.exactness import ExactnessReport
from dspark.benchmarks.perplexity import PerplexityReport
from dspark.benchmarks.plan import PlanReport
from dspark.benchmarks.prefix import PrefixReport
from dspark.benchmarks.single import SingleReport
from dspark.benchmarks.step import StepReport
from dspark.benchmarks.throughput import ThroughputReport


def print_single(console: Console, report: SingleReport) -> None:
    """Engines by speed, then the ratios and what is missing."""
    prompts = "/".join(str(n) for n in report.prompt_tokens)
    table = Table(
        title=f"one user, greedy, prompts of {prompts} tokens, {report.new_tokens} new tokens "
        f"(end of text ignored), {report.num_threads} threads, {report.rounds} rounds"
    )
    for name in ("engine", "version", "config"):
        table.add_column(name)
    for name in ("median tokens/s", "min", "max"):
        table.add_column(name, justify="right")
    for engine in sorted(report.engines, key=lambda e: -e.tokens_per_s.median):
        speed = engine.tokens_per_s
        table.add_row(
            engine.name,
            engine.version,
            _config(engine.config),
            *(f"{value:.1f}" for value in (speed.median, speed.min, speed.max)),
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    _print_ratios(console, report.ratios)
    _print_missing(console, report.missing)


def print_throughput(console: Console, report: ThroughputReport) -> None:
    """Engines with a column for each number of requests, then the ratios and what is missing."""
    sizes = list(report.ratios)
    table = Table(
        title=f"requests together, greedy, prompts of {min(report.prompt_tokens)}-"
        f"{max(report.prompt_tokens)} tokens, {report.new_tokens} new tokens, "
        f"{report.num_threads} threads, {report.rounds} rounds; tokens/s of all requests"
    )
    for name in ("engine", "version", "config"):
        table.add_column(name)
    for size in sizes:
        table.add_column(size, justify="right")
    for engine in sorted(report.engines, key=lambda e: -e.tokens_per_s[sizes[-1]].median):
        speeds = [engine.tokens_per_s[size] for size in sizes]
        table.add_row(
            engine.name,
            engine.version,
            _config(engine.config),
            *(f"{speed.median:.1f} ({speed.min:.0f}-{speed.max:.0f})" for speed in speeds),
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    for size, ratios in report.ratios.items():
        console.print(f"{size} requests:", highlight=False)
        _print_ratios(console, ratios)
    _print_missing(console, report.missing)


def print_exactness(console: Console, report: ExactnessReport) -> None:
    """A line for each run, then the verdict; a difference with how close the choice was."""
    table = Table(
        title=f"answers with a drafter against plain ones, {report.prompts} prompts, at most "
        f"{report.max_new_tokens} tokens each"
    )
    for name in ("arithmetic", "T", "batch", "identical", "tokens", "tau", "seconds"):
        table.add_column(name, justify="left" if name == "arithmetic" else "right")
    for run in report.runs:
        table.add_row(
            run.arithmetic,
            f"{run.temperature:g}",
            run.batch,
            f"{run.identical}/{run.total}",
            f"{run.tokens:,}",
            "-" if run.tau is None else f"{run.tau:.2f}",
            f"{run.seconds:.0f}",
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    for run in report.runs:
        if run.first_divergence is not None:
            console.print(
                f"{run.arithmetic}, T={run.temperature:g}, batch {run.batch}: prompt "
                f"{run.first_divergence.prompt} {run.first_divergence.divergence.sentence()}"
            )
    if not report.identical:
        console.print("ANSWERS DIFFER")
    elif not report.conclusive:
        console.print("INCONCLUSIVE: some run verified no draft, so that its answers prove nothing")
    else:
        console.print("every answer is the plain one")


def print_perplexity(console: Console, report: PerplexityReport) -> None:
    """Each arithmetic, then the ratios."""
    for name, found in report.arithmetics.items():
        console.print(
            f"{name}: perplexity {found.perplexity:.4f} over {found.num_tokens:,} tokens of "
            f"{report.answers} answers",
            highlight=False,
        )
    for name, ratio in report.ratios.items():
        console.print(f"{name}: x{ratio:.4f}", highlight=False)


def print_prefix(console: Console, report: PrefixReport) -> None:
    """Two lines, without and with the cache."""
    table = Table(
        title=f"{report.requests} requests of {report.prompt_tokens:.0f} tokens that begin alike, "
        f"{report.dtype}, T={report.temperature:g}"
    )
    table.add_column("prefix cache")
    for name in ("known tokens", "first token, ms", "tau"):
        table.add_column(name, justify="right")
    for name, known, milliseconds, tau in (
        ("off", 0.0, report.cold_ttft_ms, report.cold_tau),
        ("on", report.cached_tokens, report.warm_ttft_ms, report.warm_tau),
    ):
        shown = "-" if tau is None else f"{tau:.3f}"
        table.add_row(name, f"{known:.0f}", f"{milliseconds:.1f}", shown)
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    console.print(
        f"first token x{report.ratio:.1f} sooner; {report.identical} of {report.requests} answers "
        "are the same tokens",
        highlight=False,
    )


def _config(config: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in config.items())


def _print_ratios(console: Console, ratios: Mapping[str, float]) -> None:
    """The best of each family over the best of another; the JSON has every pair."""
    for name, ratio in ratios.items():
        us, them = name.split("/")
        if us in ("dspark", "dspark-plain") or them.startswith("dspark-plain"):
            console.print(f"{name}: x{ratio:.2f}", highlight=False)


def _print_missing(console: Console, missing: Mapping[str, str]) -> None:
    for name, command in missing.items():
        console.print(f"{name}: not installed ({command})", highlight=False)


def print_plan(console: Console, report: PlanReport) -> None:
    """Time of a plan beside the step that it is made for."""
    table = Table(title=f"choosing a budget, block of {report.block_size}")
    names = ("requests", "plan, us (median)", "with learning (mean)", "target pass, ms", "share")
    for name in names:
        table.add_column(name, justify="right")
    rows = (
        (1, report.one, report.one_request_step_ms, report.one_request_share),
        (report.requests, report.many, report.step_ms, report.share_of_step),
    )
    for requests, times, step_ms, share in rows:
        table.add_row(
            str(requests),
            f"{times.median_us:.0f}",
            f"{times.mean_us:.0f}",
            f"{step_ms:.1f}",
            f"{share:.2%}",
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)


def print_calibration(console: Console, report: CalibrationReport) -> None:
    """Errors of the foretold survival by position, before and after."""
    rows = table_rows(report)
    table = Table(title="survival: foretold against accepted", pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    console.print(report.environment.sentence(), style="dim", highlight=False)
    for found in report.classes:
        console.print(
            f"temperature {found.temperature:g}: mean error {found.mean_ece_before:.1%} before, "
            f"{found.mean_ece_after:.1%} after, {found.rounds} rounds; perfect confidences would "
            f"show {found.mean_ece_noise:.1%} by chance",
            highlight=False,
        )
        for group in found.groups:
            console.print(
                f"  {group.name}, by the fit of the others: {group.mean_ece_before:.1%} before, "
                f"{group.mean_ece_after:.1%} after, {group.rounds} rounds, chance "
                f"{group.mean_ece_noise:.1%}",
                highlight=False,
            )
    console.print(table)


def print_step_cost(console: Console, cost: StepCost) -> None:
    """Milliseconds by requests and drafted tokens of each."""
    table = Table(title=f"one step, ms, context {cost.context}", pad_edge=False)
    table.add_column("requests", justify="right")
    table.add_column("draft", justify="right")
    for width in range(cost.block_size + 1):
        table.add_column(f"verify {width}", justify="right")
    if cost.sampled is not None:
        table.add_column("more if sampled", justify="right")
    for row in cost.verify:
        count = row.num_requests
        tokens = np.array([count * (1 + width) for width in range(cost.block_size + 1)])
        context = np.array([count * cost.context])
        draft = cost.draft_seconds(np.array([count]), context)[0]
        verify = cost.verify_seconds(count, tokens, context)
        cells = [f"{1e3 * seconds:.2f}" for seconds in (draft, *verify)]
        if cost.sampled is not None:
            more = cost.sampled_seconds(count, tokens)
            cells.append(f"{1e3 * more[0]:.2f} to {1e3 * more[-1]:.2f}")
        table.add_row(str(count), *cells)
    console.print(table)


def print_step(console: Console, report: StepReport) -> None:
    """Milliseconds by size, beside the floor."""
    table = Table(
        title=f"one target pass, {report.dtype}, quantization {report.quantization or 'none'}, "
        f"keys and values {report.kv_cache_dtype}, context {report.context}"
    )
    first = next(iter(report.one_request_ms))
    for name in ("tokens", "one request, ms", f"x {first}", "one token each, ms", "x one request"):
        table.add_column(name, justify="right")
    for size, one_ms in report.one_request_ms.items():
        table.add_row(
            size,
            f"{one_ms:.2f}",
            f"{report.one_request_over_first[size]:.2f}",
            f"{report.many_requests_ms[size]:.2f}",
            f"{report.many_requests_over_one[size]:.2f}",
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    console.print(
        f"floor {report.floor_ms:.2f} ms = {report.weight_bytes / 1e6:.0f} MB of weights at "
        f"{report.stream_bytes_per_s / 1e9:.1f} GB/s, read in the same run; {first} over it: "
        f"{report.first_over_floor:.2f}"
    )
    if report.prefill_ms:
        paths = ", ".join(f"{name} {ms:.0f}" for name, ms in report.prefill_ms.items())
        theirs = (
            "" if report.plain_dtype == report.dtype else f" (all but ours {report.plain_dtype})"
        )
        console.print(f"prefill of {report.prefill} tokens, ms: {paths}{theirs}")


def print_cycle(console: Console, report: CycleReport) -> None:
    """Steps by number of requests: their length, and what of it is no operator."""
    table = Table(
        title=f"one step, {report.dtype}, quantization {report.quantization or 'none'}, "
        f"keys and values {report.kv_cache_dtype}"
    )
    for name in ("requests", "drafting", "tokens", "step, ms", "outside, ms", "share", "calls"):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.num_requests),
            "yes" if row.is_drafting else "no",
            f"{row.tokens_per_step:.1f}",
            f"{row.step_ms:.2f}",
            f"{row.outside_ms:.2f}",
            f"{100 * row.outside_share:.1f}%",
            f"{row.num_calls:.0f}",
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    console.print("outside: what a step takes beyond its operators, all Python among it")
