"""All points of a server, the table that shows them, and the picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dspark.benchmarks.plots import new_figure, require_matplotlib
from dspark.benchmarks.results_file import ResultsFile
from dspark.benchmarks.serve.config import Load, LoadKind, ServeBenchConfig
from dspark.benchmarks.serve.crowd import Measure
from dspark.benchmarks.serve.point import CountTokens, Percentiles, Point, point_of

OnPoint = Callable[[Point], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """What one server did under all loads."""

    url: str
    model: str
    num_prompts: int
    config: ServeBenchConfig
    points: Sequence[Point]

    @property
    def has_failed(self) -> bool:
        """Whether some load has no figures."""
        return any(point.has_failed for point in self.points)

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""
        return {
            "url": self.url,
            "model": self.model,
            "num_prompts": self.num_prompts,
            "settings": self.config.settings(),
            "points": [point.to_json() for point in self.points],
        }


class PointsFile:
    """Points that were measured before, by load; failed ones are measured again."""

    def __init__(self, path: Path, *, settings: Mapping[str, Any]) -> None:
        """Raises `InputError` if the file holds points of other settings."""
        self._file = ResultsFile(path, settings=settings, owner="a served model")
        self._found: dict[Load, Point] = {}
        for number, row in enumerate(self._file.rows, start=1):
            try:
                point = Point(**row)
            except TypeError as error:
                raise self._file.foreign(number) from error
            self._found[point.load] = point

    def find(self, load: Load) -> Point | None:
        """A point with figures."""
        point = self._found.get(load)
        return None if point is None or point.has_failed else point

    def add(self, point: Point) -> None:
        """Append and wait until it is on the disk."""
        self._file.add(asdict(point))


def measure_all(
    config: ServeBenchConfig,
    measure: Measure,
    *,
    file: PointsFile | None = None,
    on_point: OnPoint = lambda _: None,
    count_tokens: CountTokens | None = None,
) -> list[Point]:
    """Every load, those of `file` taken over."""
    points = []
    for load in config.loads:
        point = None if file is None else file.find(load)
        if point is None:
            point = point_of(load, measure(load), config, count_tokens=count_tokens)
            if file is not None:
                file.add(point)
        on_point(point)
        points.append(point)
    return points


def print_serve(console: Console, report: ServeReport) -> None:
    """A row for each load."""
    config = report.config
    console.print(
        f"{report.url}, {report.model}: {report.num_prompts} prompts, answers of at most "
        f"{config.max_new_tokens} tokens, T={config.temperature:g}, {config.seconds:g} s a point. "
        "Tokens are those of the server's usage; a chunk may hold several. ttft (first token), "
        "itl (between tokens) and gap (between chunks) are p50/p99 in ms.",
        style="dim",
        highlight=False,
    )
    console.print(_table(report))
    for point in report.points:
        for name, number in point.error_names.items():
            console.print(f"{point.load.name}: {number} times {name}", style="red")
        if point.doubt is not None:
            console.print(point.doubt, style="bold red", highlight=False)
        if point.num_requests > report.num_prompts:
            console.print(
                f"{point.load.name}: {point.num_requests} requests had {report.num_prompts} "
                "prompts, so a prefix cache helped; more prompts avoid that.",
                style="dim",
                highlight=False,
            )


def _table(report: ServeReport) -> Table:
    table = Table(pad_edge=False, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("load", no_wrap=True)
    names = ("n", "errors", "tokens/s", "a user", "ttft", "itl", "gap", "per chunk")
    for name in (*names, *(["goodput/s"] * report.config.has_sla)):
        table.add_column(name, justify="right")
    for point in report.points:
        cells = [
            point.load.name,
            str(point.num_requests),
            str(point.errors),
            "FAILED" if point.has_failed else f"{point.tokens_per_s:.1f}",
            _number(point.per_user_tokens_per_s),
            _pair(point.ttft_ms),
            _pair(point.itl_ms),
            _pair(point.chunk_gap_ms),
            _number(point.tokens_per_chunk),
        ]
        if report.config.has_sla:
            share = "" if point.goodput_share is None else f" ({point.goodput_share:.0%})"
            cells.append(_number(point.goodput_per_s) + share)
        table.add_row(*cells)
    return table


def save_frontier(report: ServeReport, path: Path) -> None:
    """Throughput of all against the speed of one, and the first token, as a PNG picture.

    Raises `InputError` where matplotlib is not installed.
    """
    require_matplotlib()
    figure, (frontier, waits) = new_figure(2, height=3.8)
    for kind in LoadKind:
        points = [p for p in report.points if p.kind == kind and not p.has_failed]
        shown = [p for p in points if p.per_user_tokens_per_s is not None]
        if not shown:
            continue
        label = "users" if kind is LoadKind.CLOSED else "requests/s"
        frontier.plot(
            [p.per_user_tokens_per_s for p in shown],
            [p.tokens_per_s for p in shown],
            marker="o",
            label=label,
        )
        for p in shown:
            where = (p.per_user_tokens_per_s, p.tokens_per_s)
            frontier.annotate(
                f"{p.level:g}", where, textcoords="offset points", xytext=(5, 3), fontsize="small"
            )
        for name, style in (("p50", "-"), ("p99", "--")):
            waits.plot(
                [p.level for p in points],
                [(p.ttft_ms or {})[name] for p in points],
                style,
                marker="o",
                label=f"{name}, by {label}",
            )
    frontier.set(xlabel="tokens/s of one user", ylabel="tokens/s of all users", title=report.model)
    waits.set(xlabel="load", ylabel="first token, ms")
    for axis in (frontier, waits):
        if axis.lines:
            axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _pair(values: Percentiles | None) -> str:
    return "-" if values is None else f"{values['p50']:.0f}/{values['p99']:.0f}"
