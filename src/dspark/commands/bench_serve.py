"""`dspark bench serve`: a server under load. Parses, measures, prints; exit code 1 on a failure."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    ApiKeyFile,
    ClientLimit,
    ClientPrompts,
    Concurrency,
    Json,
    Model,
    Rates,
    Url,
)
from dspark.commands.checks import file_to_write
from dspark.commands.shared import (
    key_of,
    numbers_in,
    print_report,
    say_written,
    whole_numbers_in,
)
from dspark.errors import ServerFault
from dspark.options import given, option

if TYPE_CHECKING:
    from dspark.benchmarks.serve.point import CountTokens

_SERVE = "benchmarks.serve.config.ServeBenchConfig"


def serve(
    url: Url,
    model: Model = None,
    prompts: ClientPrompts = None,
    limit: ClientLimit = None,
    concurrency: Concurrency = "1,4,16",
    rates: Rates = "",
    seconds: Annotated[float | None, option(_SERVE, "seconds")] = None,
    warmup_seconds: Annotated[float | None, option(_SERVE, "warmup_seconds")] = None,
    max_new_tokens: Annotated[int | None, option(_SERVE, "max_new_tokens")] = None,
    temperature: Annotated[float | None, option(_SERVE, "temperature")] = None,
    sla_ttft_ms: Annotated[float | None, option(_SERVE, "sla_ttft_ms")] = None,
    sla_itl_ms: Annotated[float | None, option(_SERVE, "sla_itl_ms")] = None,
    seed: Annotated[int | None, option(_SERVE, "seed")] = None,
    timeout_seconds: Annotated[float | None, option(_SERVE, "timeout_seconds")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="File that takes each point as it ends; the same file goes on.",
            callback=file_to_write,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="PNG picture: throughput against the speed of one user.", callback=file_to_write
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory, GGUF file or name of the model: its tokenizer counts the texts, and "
            "usage that differs is told.",
            show_default="usage is believed",
        ),
    ] = None,
    api_key_file: ApiKeyFile = None,
    as_json: Json = False,
) -> None:
    """Any OpenAI-compatible server under load, as its users see it, by streaming.

    Example: dspark bench serve --url http://localhost:8000/v1 --concurrency 1,8 --sla-ttft-ms 500
    """
    from dspark.benchmarks.client_prompts import chats_of
    from dspark.benchmarks.http_api import HttpApi, first_model
    from dspark.benchmarks.plots import require_matplotlib
    from dspark.benchmarks.serve.config import Load, ServeBenchConfig
    from dspark.benchmarks.serve.crowd import Crowd, measure
    from dspark.benchmarks.serve.point import Point
    from dspark.benchmarks.serve.report import (
        PointsFile,
        ServeReport,
        measure_all,
        print_serve,
        save_frontier,
    )

    config = ServeBenchConfig(
        concurrency=whole_numbers_in("concurrency", concurrency),
        rates=numbers_in("rates", rates),
        **given(
            seconds=seconds,
            warmup_seconds=warmup_seconds,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            sla_ttft_ms=sla_ttft_ms,
            sla_itl_ms=sla_itl_ms,
            seed=seed,
            timeout_seconds=timeout_seconds,
        ),
    )
    if plot is not None:
        require_matplotlib()
    count_tokens = None if tokenizer is None else counter_of(tokenizer)
    api = HttpApi(url=url, api_key=key_of(api_key_file), timeout_s=config.timeout_seconds)
    name = model or first_model(api)
    chats = chats_of(prompts, limit=limit)
    settings = {"url": url, "model": name, "prompts": len(chats), **config.settings()}
    file = None if results is None else PointsFile(results, settings=settings)
    console = Console(stderr=True)

    def measured(load: Load) -> Crowd:
        with console.status(load.name):
            return measure(api, model=name, chats=chats, load=load, config=config)

    def say(point: Point) -> None:
        found = "failed" if point.has_failed else f"{point.tokens_per_s:.1f} tokens/s"
        console.print(f"{point.load.name}: {found}", style="dim", highlight=False)

    report = ServeReport(
        url=url,
        model=name,
        num_prompts=len(chats),
        config=config,
        points=measure_all(config, measured, file=file, on_point=say, count_tokens=count_tokens),
    )
    print_report(report, print_serve, as_json=as_json)
    if plot is not None:
        save_frontier(report, plot)
        say_written(console, [plot])
    if report.has_failed:
        raise ServerFault("failed", f"{url} answered no request of some load; see the errors.")


def counter_of(source: str) -> "CountTokens":
    """How many tokens the tokenizer of a model makes of a text."""
    from dspark.models.target_source import resolve_source
    from dspark.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_source(source))
    return lambda text: len(tokenizer.encode_rendered(text))
