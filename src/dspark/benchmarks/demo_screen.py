"""`dspark demo` on a terminal: both answers as they stream, then a table and a sentence on it.

It measures nothing.
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.benchmarks.demo import DemoReport, PromptReport, Verdict
from dspark.benchmarks.painter import Painter
from dspark.benchmarks.workload import Prompt
from dspark.completion import Piece
from dspark.text.tokenizer import Tokenizer


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
        "copied",
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
            f"{row.copied:.0%}",
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
