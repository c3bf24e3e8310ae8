"""`dspark bench overhead`: our server beside its own engine. Parses, measures, prints."""

import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    Json,
)
from dspark.commands.bundles import Except
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import print_report, say_round
from dspark.options import given, option

if TYPE_CHECKING:
    from dspark.benchmarks.overhead.overhead import OverheadReport

_OVERHEAD = "benchmarks.overhead.config.OverheadConfig"


def overhead(
    options: Annotated[ModelOptions, Except("device")],
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts in any form that evaluate reads.", show_default="32 built in"),
    ] = None,
    users: Annotated[int | None, option(_OVERHEAD, "users")] = None,
    answers: Annotated[int | None, option(_OVERHEAD, "answers")] = None,
    max_new_tokens: Annotated[int | None, option(_OVERHEAD, "max_new_tokens")] = None,
    temperature: Annotated[float | None, option(_OVERHEAD, "temperature")] = None,
    first_tokens: Annotated[int | None, option(_OVERHEAD, "first_tokens")] = None,
    rounds: Annotated[int | None, option(_OVERHEAD, "rounds")] = None,
    seed: Annotated[int | None, option(_OVERHEAD, "seed")] = None,
    as_json: Json = False,
) -> None:
    """What our server costs: its throughput and first token beside those of its engine alone.

    Example: dspark bench overhead --users 16 --json
    """
    from dspark.benchmarks.client_prompts import chats_of, many_chats
    from dspark.benchmarks.overhead.config import OverheadConfig
    from dspark.benchmarks.overhead.overhead import measure

    config = OverheadConfig(
        **given(
            users=users,
            answers=answers,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            first_tokens=first_tokens,
            rounds=rounds,
            seed=seed,
        )
    )
    chats = many_chats(32) if prompts is None else chats_of(prompts, limit=config.answers)
    console = Console(stderr=True)
    llm = options.load(console, max_requests=config.users)
    with console.status("filling the memory"):
        llm = llm.with_config(replace(llm.config, prefix_cache=False))
        llm.cycle(speculation=True)
    with console.status("engine and server in turn"):
        report = measure(llm, chats, config, on_round=partial(say_round, console))
    print_report(report, _print, as_json=as_json)


def _print(console: Console, report: "OverheadReport") -> None:
    engine = statistics.median(taken.tokens_per_s for taken in report.engine)
    server = statistics.median(taken.tokens_per_s for taken in report.server)
    console.print(report.environment.sentence(), style="dim", highlight=False)
    console.print(
        f"{report.users} users, {report.answers} answers, {report.policy} policy: server "
        f"{server:.1f} tokens/s, engine alone {engine:.1f}, ratio {report.throughput_ratio:.3f}\n"
        f"first token of one user, prompts of {report.prompt_tokens:.0f} tokens: server "
        f"{report.server_first_ms:.2f} ms, engine alone {report.engine_first_ms:.2f}, ratio "
        f"{report.first_token_ratio:.3f}",
        highlight=False,
        soft_wrap=True,
    )
