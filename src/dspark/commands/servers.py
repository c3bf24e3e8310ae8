"""`dspark bench servers`: our server beside others. Parses, starts each in turn, prints."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import Json, Target, Threads
from dspark.commands.bench_serve import counter_of
from dspark.commands.checks import folder_to_write
from dspark.commands.shared import names_in, print_report, whole_numbers_in
from dspark.errors import ServerFault
from dspark.options import given, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark.benchmarks.client_prompts import Chat
    from dspark.benchmarks.peer_servers import ServerCall
    from dspark.benchmarks.serve.config import ServeBenchConfig
    from dspark.benchmarks.serve.point import CountTokens, Point
    from dspark.benchmarks.serve.report import PointsFile

_SERVE = "benchmarks.serve.config.ServeBenchConfig"


def servers(
    peers: Annotated[
        str,
        typer.Option(
            help="Servers of others, separated by commas; one that is missing is named. An empty "
            "text: none."
        ),
    ] = "llama-server,vllm",
    target: Target = None,
    concurrency: Annotated[
        str, typer.Option(help="Users of closed loads, separated by commas.")
    ] = "1,4,16,32",
    seconds: Annotated[float | None, option(_SERVE, "seconds")] = None,
    warmup_seconds: Annotated[float | None, option(_SERVE, "warmup_seconds")] = None,
    max_new_tokens: Annotated[int | None, option(_SERVE, "max_new_tokens")] = None,
    temperature: Annotated[float | None, option(_SERVE, "temperature")] = None,
    seed: Annotated[int | None, option(_SERVE, "seed")] = None,
    threads: Threads = None,
    ours: Annotated[
        str, typer.Option(help="More options of our own `dspark serve`, separated by spaces.")
    ] = "",
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder that takes each point as it ends; the same folder goes on.",
            callback=folder_to_write,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Our server, llama.cpp's and vLLM's on the same weights in bf16, asked by the same client.

    Each is started for its turn and ended after it. Example: dspark bench servers --seconds 20
    """
    from dspark.benchmarks import peer_servers, peer_setup
    from dspark.benchmarks.client_prompts import many_chats
    from dspark.benchmarks.environment import Environment
    from dspark.benchmarks.race import usable_processors
    from dspark.benchmarks.serve.beside import ServersReport, print_servers
    from dspark.benchmarks.serve.config import ServeBenchConfig
    from dspark.benchmarks.serve.report import PointsFile
    from dspark.models.embedded import DEFAULT_TARGET

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this command
    names = names_in(peers)
    peer_servers.check_names(names)
    config = ServeBenchConfig(
        concurrency=whole_numbers_in("concurrency", concurrency),
        **given(
            seconds=seconds,
            warmup_seconds=warmup_seconds,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        ),
    )
    console = Console(stderr=True)
    chats = many_chats(32)
    source = DEFAULT_TARGET if target is None else target
    num_users, num_threads = max(config.concurrency), threads or len(usable_processors())
    found = {
        name: peer_servers.peer(name, source, num_users=num_users, threads=num_threads)
        for name in names
    }
    calls = [
        peer_servers.ours(source, num_users=num_users, threads=num_threads, options=ours.split()),
        *(call for call in found.values() if call is not None),
    ]
    points = {}
    for call in calls:
        settings = {"server": call.name, "target": source, "ours": ours, **config.settings()}
        file = None
        if results is not None:
            file = PointsFile(results / f"{call.name}.jsonl", settings=settings)
        points[call.name] = _points(
            console, call, chats, config, file, count_tokens=counter_of(source)
        )
    report = ServersReport(
        points=points,
        missing={
            name: peer_setup.install_command(name) for name, call in found.items() if call is None
        },
        num_prompts=len(chats),
        config=config,
        environment=Environment.here(),
    )
    print_report(report, print_servers, as_json=as_json)
    if report.has_failed:
        raise ServerFault("failed", "A server answered no request of some load.")


def _points(
    console: Console,
    call: "ServerCall",
    chats: "Sequence[Chat]",
    config: "ServeBenchConfig",
    file: "PointsFile | None",
    *,
    count_tokens: "CountTokens",
) -> "list[Point]":
    """One server's turn; it is not started where the file holds all."""
    from dspark.benchmarks import peer_servers
    from dspark.benchmarks.http_api import first_model
    from dspark.benchmarks.serve.crowd import measure
    from dspark.benchmarks.serve.report import measure_all

    def say(point: "Point") -> None:
        rate = "failed" if point.has_failed else f"{point.tokens_per_s:.1f} tokens/s"
        console.print(f"{call.name}, {point.load.name}: {rate}", style="dim", highlight=False)

    found = [] if file is None else [file.find(load) for load in config.loads]
    known = [point for point in found if point is not None]
    if len(known) == len(config.loads):
        return known
    with peer_servers.running(call) as api:
        model = first_model(api)
        return measure_all(
            config,
            lambda load: measure(api, model=model, chats=chats, load=load, config=config),
            file=file,
            on_point=say,
            count_tokens=count_tokens,
        )
