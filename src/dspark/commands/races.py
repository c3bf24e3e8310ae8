"""`dspark bench single`, `throughput` and `peers`: our engine beside others, in one run."""

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    Arithmetic,
    Drafter,
    Json,
    PeerPython,
    Peers,
    Policy,
    PromptFileOption,
    Target,
)
from dspark.commands.shared import (
    names_in,
    print_report,
    say_ready,
    say_round,
    whole_numbers_in,
)
from dspark.options import given, option

_RACE = "benchmarks.race.RaceConfig"
_ALL_PEERS = "transformers,llama-cpp,openvino,vllm"


def single(
    peers: Peers = _ALL_PEERS,
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    arithmetic: Arithmetic = "bf16,int8",
    prompts: PromptFileOption = None,
    peer_python: PeerPython = [],  # noqa: B006 (typer copies it)
    threads: Annotated[int | None, option(_RACE, "num_threads", "--threads")] = None,
    rounds: Annotated[int | None, option(_RACE, "rounds")] = None,
    max_new_tokens: Annotated[
        int | None, option(_RACE, "max_new_tokens", "--max-new-tokens", "--max-tokens")
    ] = None,
    as_json: Json = False,
) -> None:
    """One user's speed here and in other engines: same prompts, same counts, same threads.

    A peer that is not installed is listed with the command that installs it; an engine that fails
    ends the run with an error and no figure.
    """
    from dspark import comparison
    from dspark.benchmarks.race import RaceConfig
    from dspark.benchmarks.single import measure
    from dspark.benchmarks.tables import print_single

    config = RaceConfig(**given(num_threads=threads, rounds=rounds, max_new_tokens=max_new_tokens))
    entry = comparison.race_entry(
        target=target,
        drafter=drafter,
        policy=policy,
        arithmetics=names_in(arithmetic),
        peers=names_in(peers),
        pythons=peer_python,
        prompts=prompts,
        num_prompts=4,
    )
    console = Console(stderr=True)
    report = measure(
        entry.engines,
        entry.prompts,
        source=entry.source,
        config=config,
        places=entry.places,
        on_ready=partial(say_ready, console),
        on_round=partial(say_round, console),
    )
    print_report(report, print_single, as_json=as_json)


def throughput(
    concurrency: Annotated[
        str, typer.Option(help="Requests that run together, separated by commas.")
    ] = "8,16,32",
    peers: Peers = "llama-cpp,openvino,vllm",
    target: Target = None,
    drafter: Drafter = None,
    policy: Policy = None,
    arithmetic: Arithmetic = "bf16,int8",
    prompts: PromptFileOption = None,
    peer_python: PeerPython = [],  # noqa: B006 (typer copies it)
    threads: Annotated[int | None, option(_RACE, "num_threads", "--threads")] = None,
    rounds: Annotated[int | None, option(_RACE, "rounds")] = None,
    max_new_tokens: Annotated[
        int | None, option(_RACE, "max_new_tokens", "--max-new-tokens", "--max-tokens")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tokens a second of many requests together, here and in other engines, in one run."""
    from dspark import comparison
    from dspark.benchmarks.race import RaceConfig
    from dspark.benchmarks.tables import print_throughput
    from dspark.benchmarks.throughput import measure

    config = RaceConfig(**given(num_threads=threads, rounds=rounds, max_new_tokens=max_new_tokens))
    sizes = whole_numbers_in("concurrency", concurrency)
    entry = comparison.race_entry(
        target=target,
        drafter=drafter,
        policy=policy,
        arithmetics=names_in(arithmetic),
        peers=names_in(peers),
        pythons=peer_python,
        prompts=prompts,
        num_prompts=32,
    )
    console = Console(stderr=True)
    report = measure(
        entry.engines,
        entry.prompts,
        concurrency=sizes,
        source=entry.source,
        config=config,
        places=entry.places,
        on_ready=partial(say_ready, console),
        on_round=partial(say_round, console),
    )
    print_report(report, print_throughput, as_json=as_json)


def install_peers(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="llama-cpp, llama-server, openvino, vllm.", show_default="all of them"),
    ] = None,
) -> None:
    """Install the other engines, each in an environment of its own with fixed versions.

    The two of llama.cpp are compiled here (minutes); the others are about 2 GB each. `bench single`
    and `bench servers` find them.
    """
    from dspark.benchmarks.peer_setup import PEERS, install

    console = Console(stderr=True)
    for name in names or list(PEERS):
        python = install(name, say=lambda text: console.print(text, highlight=False))
        print(f"{name}: {python}")
