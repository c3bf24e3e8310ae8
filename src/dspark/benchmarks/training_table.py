"""The table of `dspark bench train`. It measures nothing."""

from rich.console import Console
from rich.table import Table

from dspark.benchmarks.training import TrainBenchReport


def print_training(console: Console, report: TrainBenchReport) -> None:
    """Both steps side by side, and what follows."""
    values = report.to_json()
    table = Table(title=f"one step of {report.supervised_tokens:,} supervised tokens")
    table.add_column("")
    for name in ("here", "DeepSpec's step", "ratio"):
        table.add_column(name, justify="right")
    ours, theirs = report.ours, report.deepspec
    rows = (
        ("tokens/s", ours.tokens_per_s, theirs.tokens_per_s, values["speed_ratio"]),
        ("step, s", ours.step_s, theirs.step_s, ours.step_s / theirs.step_s),
        (
            "peak memory, MB",
            ours.peak_memory_bytes / 1e6,
            theirs.peak_memory_bytes / 1e6,
            values["memory_ratio"],
        ),
        (
            "added by the step, MB",
            ours.step_memory_bytes / 1e6,
            theirs.step_memory_bytes / 1e6,
            values["step_memory_ratio"],
        ),
    )
    for name, here, there, ratio in rows:
        table.add_row(name, f"{here:,.2f}", f"{there:,.2f}", f"{ratio:.2f}")
    console.print(table)
    console.print(
        f"the losses differ by {values['loss_difference']:.1e} in {report.config.dtype} and by "
        f"{values['loss_difference_fp32']:.1e} in float32"
    )
