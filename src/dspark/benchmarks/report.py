"""What a person sees: coloured answers, tables, a sentence that judges them.

It decides nothing about how answers are made.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.calibration import CalibrationReport, table_rows
from dspark.benchmarks.cycle import CycleReport
from dspark.benchmarks.demo import DemoReport, PromptReport, Verdict
from dspark.benchmarks.exactness import ExactnessReport
from dspark.benchmarks.perplexity import PerplexityReport
from dspark.benchmarks.plan import PlanReport
from dspark.benchmarks.prefix import PrefixReport
from dspark.benchmarks.single import SingleReport
from dspark.benchmarks.step import StepReport
from dspark.benchmarks.throughput import ThroughputReport
from dspark.benchmarks.workload import Prompt
from dspark.completion import Piece
from dspark.core import Origin, SamplingParams
from dspark.llm import LLM
from dspark.text.detokenizer import Detokenizer
from dspark.text.tokenizer import Tokenizer

_STYLES = {
    Origin.ACCEPTED: "green",
    Origin.CORRECTED: "red",
    Origin.BONUS: "cyan",
    Origin.PLAIN: "",
}


class Painter:
    """Turns the pieces of one answer into text coloured by how each token came to be."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, stop)

    def paint(self, piece: Piece) -> Text:
        """The printable part of a piece; a character takes the colour of its last token."""
        text = Text()
        origin = Origin.PLAIN
        for token_id, origin in zip(piece.token_ids, piece.origins, strict=True):
            text.append(self._detokenizer.push([token_id]), _STYLES[origin])
        if piece.finish_reason is not None:
            text.append(self._detokenizer.flush(), _STYLES[origin])
        return text


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("drafted and accepted", "green"), "  ", ("corrected", "red"), "  ",
        ("the target's own after a full block", "cyan"), "  plain",
    )  # fmt: skip


class DemoScreen:
    """Follows a demo on a terminal: prompt, both answers as they stream, one line of figures."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._painter = Painter(tokenizer)

    def on_prompt(self, number: int, total: int, prompt: Prompt) -> None:
        """A rule with the domain, then the prompt."""
        self._console.rule(f"[bold]{number}/{total}  {prompt.domain}")
        self._console.print(Text(prompt.text, style="bold"))

    def on_answer(self, *, is_dspark: bool) -> None:
        """A fresh line with the name of what is decoding."""
        self._painter = Painter(self._tokenizer)
        self._console.print("\n[bold]DSpark[/bold]  " if is_dspark else "\n[bold]plain[/bold]  ")

    def on_piece(self, piece: Piece) -> None:
        """The next words."""
        self._console.print(self._painter.paint(piece), end="", soft_wrap=True, highlight=False)

    def on_result(self, report: PromptReport) -> None:
        """Speed and comparison of this prompt."""
        same = "same text" if report.identical else "DIFFERENT TEXT"
        if report.divergence is not None:
            same = report.divergence.sentence()
        self._console.print(
            f"\n\n[dim]plain {report.plain_tokens_per_s:.1f} tokens/s, DSpark "
            f"{report.dspark_tokens_per_s:.1f} tokens/s: x{report.speedup:.2f}, tau "
            f"{report.tau:.2f}, {same}[/dim]"
        )


def print_demo(console: Console, report: DemoReport) -> None:
    """One line per domain, then what it means."""
    title = f"plain decoding and DSpark, {report.dtype}, T={report.temperature:g}"
    table = Table(title=title, pad_edge=False)
    table.add_column("domain")
    for name in (
        "n",
        "plain tokens/s",
        "DSpark tokens/s",
        "speed-up",
        "tau",
        "acceptance",
        "identical",
    ):
        table.add_column(name, justify="right")
    for row in report.domains:
        table.add_row(
            row.domain,
            str(row.num_prompts),
            f"{row.plain_tokens_per_s:.1f}",
            f"{row.dspark_tokens_per_s:.1f}",
            f"x{row.speedup:.2f}",
            f"{row.tau:.2f}",
            f"{row.acceptance:.0%}",
            f"{row.num_identical}/{row.num_prompts}",
        )
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(table)
    for prompt in report.prompts:
        if prompt.divergence is not None:
            console.print(f"{prompt.prompt[:50]!r} {prompt.divergence.sentence()}")
    speedups = [prompt.speedup for prompt in report.prompts]
    console.print(
        f"median speed-up x{report.median_speedup:.2f} (x{min(speedups):.2f} to "
        f"x{max(speedups):.2f}), tau {report.tau:.2f} (tokens per round, the target's own "
        f"included), text: {report.verdict.value}"
    )
    if report.verdict is Verdict.INCONCLUSIVE:
        console.print("Nothing was drafted, so equal texts prove nothing; give a drafter.")
    elif report.median_speedup < 1.0:
        console.print("Here DSpark is slower than plain decoding: do not enable it for this model.")


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


def stream_answer(
    console: Console,
    figures: Console,
    llm: LLM,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    shows_origins: bool,
) -> None:
    """Print an answer while it grows, then its speed in one line of its own."""
    painter = Painter(llm.tokenizer, stop=params.stop)
    started, num_tokens, num_rounds = time.perf_counter(), 0, 0
    for piece in llm.stream(prompt_ids, params):
        text = painter.paint(piece) if shows_origins else Text(piece.text)
        console.print(text, end="", soft_wrap=True, highlight=False)
        num_tokens += len(piece.token_ids)
        num_rounds += 1
    seconds = time.perf_counter() - started
    console.print()
    figures.print(
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, "
        f"{num_tokens / max(num_rounds, 1):.2f} tokens a step"
        + ("" if llm.block_size else ", no drafter"),
        style="dim",
        highlight=False,
    )


def answer_json(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """One answer as the keys of a `--json` line."""
    started = time.perf_counter()
    completion = llm.generate([prompt_ids], params)[0]
    seconds = time.perf_counter() - started
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "origins": [origin.value for origin in completion.origins],
        "finish_reason": completion.finish_reason.value,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "tau": completion.stats.tau,
        "seconds": seconds,
    }
