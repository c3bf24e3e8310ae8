"""Several servers under the same loads: one table, and ours over each of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dspark.benchmarks.environment import Environment
from dspark.benchmarks.serve.config import ServeBenchConfig
from dspark.benchmarks.serve.point import Point

_RATIOS = ("tokens_per_s", "per_user")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersReport:
    """Each server's points, ours first."""

    points: Mapping[str, Sequence[Point]]
    missing: Mapping[str, str]
    """Servers that are not installed, and the command for it."""
    num_prompts: int
    config: ServeBenchConfig
    environment: Environment

    @property
    def ratios(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        """Ours over each other server, by the load's level: `tokens_per_s`, `per_user`."""
        us, *others = self.points
        return {
            f"{us}/{name}": {
                f"{a.level:g}": _ratios(a, b)
                for a, b in zip(self.points[us], self.points[name], strict=True)
            }
            for name in others
        }

    @property
    def has_failed(self) -> bool:
        """Whether some load of some server has no figures."""
        return any(point.has_failed for points in self.points.values() for point in points)

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""
        return {
            "servers": {
                name: [point.to_json() for point in points] for name, points in self.points.items()
            },
            "ratios": self.ratios,
            "missing": self.missing,
            "num_prompts": self.num_prompts,
            "settings": self.config.settings(),
        }


def _ratios(a: Point, b: Point) -> Mapping[str, float]:
    pairs = {
        "tokens_per_s": (a.tokens_per_s, b.tokens_per_s),
        "per_user": (a.per_user_tokens_per_s, b.per_user_tokens_per_s),
    }
    return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours and theirs}


def print_servers(console: Console, report: ServersReport) -> None:
    """A row for each load and server."""
    config = report.config
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(
        f"bf16, one client, {report.num_prompts} prompts, answers of at most "
        f"{config.max_new_tokens} tokens, T={config.temperature:g}, {config.seconds:g} s a point; "
        "ttft is p50/p99 in ms; the ratios are ours over theirs.",
        style="dim",
        highlight=False,
    )
    table = Table(pad_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("load", no_wrap=True)
    table.add_column("server", no_wrap=True)
    for name in ("tokens/s", "a user", "ttft", "errors", "ratio", "ratio, a user"):
        table.add_column(name, justify="right")
    us = next(iter(report.points))
    for place, load in enumerate(config.loads):
        for name, points in report.points.items():
            point = points[place]
            ratios = report.ratios.get(f"{us}/{name}", {}).get(f"{load.level:g}", {})
            table.add_row(
                load.name,
                name,
                _number(point.tokens_per_s),
                _number(point.per_user_tokens_per_s),
                "-" if not point.ttft_ms else "{p50:.0f}/{p99:.0f}".format(**point.ttft_ms),
                str(point.errors),
                *(f"{ratios[key]:.2f}" if key in ratios else "" for key in _RATIOS),
            )
    console.print(table)
    for name, points in report.points.items():
        for point in points:
            if point.doubt is not None:
                console.print(f"{name}, {point.doubt}", style="bold red", highlight=False)
    for name, command in report.missing.items():
        console.print(f"{name} is not installed: {command}", highlight=False)


def _number(value: float | None) -> str:
    return "FAILED" if value is None else f"{value:.1f}"
