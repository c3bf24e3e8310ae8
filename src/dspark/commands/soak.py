"""`dspark bench soak`: rude traffic for long. Parses, runs, prints; exit code 1 on a fault."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from dspark.commands.arguments import (
    ApiKeyFile,
    ClientLimit,
    ClientPrompts,
    Json,
    Model,
    Url,
)
from dspark.commands.shared import key_of, print_report
from dspark.errors import ServerFault
from dspark.options import given, option

if TYPE_CHECKING:
    from dspark.benchmarks.soak.soak import SoakReport
    from dspark.benchmarks.soak.visits import Verdict

_SOAK = "benchmarks.soak.config.SoakConfig"


def soak(
    url: Url,
    model: Model = None,
    prompts: ClientPrompts = None,
    limit: ClientLimit = None,
    minutes: Annotated[float | None, option(_SOAK, "minutes")] = None,
    visitors: Annotated[int | None, option(_SOAK, "visitors")] = None,
    max_new_tokens: Annotated[int | None, option(_SOAK, "max_new_tokens")] = None,
    huge_tokens: Annotated[int | None, option(_SOAK, "huge_tokens")] = None,
    max_growth: Annotated[float | None, option(_SOAK, "max_growth")] = None,
    seed: Annotated[int | None, option(_SOAK, "seed")] = None,
    api_key_file: ApiKeyFile = None,
    as_json: Json = False,
) -> None:
    """Rude traffic at saturation: cancels, slow readers, huge and tiny prompts, broken requests.

    Every greedy answer is compared with its reference, which was asked alone and undrafted.

    Example: dspark bench soak --url http://localhost:8000/v1 --minutes 30
    """
    from dspark.benchmarks.client_prompts import chats_of
    from dspark.benchmarks.http_api import HttpApi, first_model
    from dspark.benchmarks.soak import soak as bench
    from dspark.benchmarks.soak.config import SoakConfig

    config = SoakConfig(
        **given(
            minutes=minutes,
            visitors=visitors,
            max_new_tokens=max_new_tokens,
            huge_tokens=huge_tokens,
            max_growth=max_growth,
            seed=seed,
        )
    )
    api = HttpApi(url=url, api_key=key_of(api_key_file), timeout_s=config.timeout_seconds)
    console = Console(stderr=True)
    with console.status("references") as status:

        def say(minutes: float, verdicts: "Counter[Verdict]") -> None:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            status.update(f"{minutes:.1f} of {config.minutes:g} minutes: {counts}")

        report = bench.soak(
            api,
            model=model or first_model(api),
            chats=chats_of(prompts, limit=limit),
            config=config,
            on_time=say,
        )
    print_report(report, _print, as_json=as_json)
    if not report.passed:
        raise ServerFault("failed", f"{url} did not pass: {_why(report)}.")


def _why(report: "SoakReport") -> str:
    if report.wrong or report.lost:
        return f"{report.wrong} wrong and {report.lost} lost, first: {report.faults[0]}"
    if any(report.left.values()):
        return f"when all had left it still held {dict(report.left)}"
    if not report.visits:
        return "nobody came"
    return f"its memory grew by {report.memory_growth or 0.0:.1%}"


def _print(console: Console, report: "SoakReport") -> None:
    table = Table(title=f"{report.minutes:g} minutes, {report.visitors} visitors at a time")
    table.add_column("visitor")
    names = ("right", "wrong", "lost", "busy")
    for name in names:
        table.add_column(name, justify="right")
    for kind, row in sorted(report.visits.items()):
        table.add_row(kind, *(f"{row[name]:,}" for name in names))
    console.print(table)
    growth = report.memory_growth
    console.print(
        f"{report.characters:,} characters compared; left when all had gone: "
        f"{dict(report.left) or 'not told'}; memory "
        + (
            "not told"
            if growth is None
            else f"{report.memory_bytes[-1] / 1e6:,.0f} MB at the end, {growth:+.1%} from the "
            "second quarter to the last"
        ),
        highlight=False,
    )
