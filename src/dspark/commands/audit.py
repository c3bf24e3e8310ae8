"""`dspark audit`: is a server lossless? Parses, asks, prints; exit code 1 where it is not."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import ApiKeyFile, Json, Model, Url
from dspark.commands.checks import at_least_one
from dspark.commands.shared import key_of, print_report
from dspark.errors import DSparkError
from dspark.options import given, option

_AUDIT = "benchmarks.server_audit.config.AuditConfig"


class NotLosslessError(DSparkError):
    """The audit found a loss: exit code 1."""


def audit(
    url: Url,
    model: Model = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Base of a server with the same model and no drafts, to compare with.",
            show_default="the same server, told not to draft",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(help="Name of the model there.", show_default="the first listed")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts in any form that evaluate reads.", show_default="12 built in"),
    ] = None,
    limit: Annotated[int, typer.Option(help="Prompts, at most.", callback=at_least_one)] = 12,
    temperature: Annotated[float | None, option(_AUDIT, "temperature")] = None,
    samples: Annotated[int | None, option(_AUDIT, "samples")] = None,
    tokens: Annotated[int | None, option(_AUDIT, "tokens")] = None,
    sampled_prompts: Annotated[int | None, option(_AUDIT, "sampled_prompts")] = None,
    greedy_tokens: Annotated[int | None, option(_AUDIT, "greedy_tokens")] = None,
    false_alarm: Annotated[float | None, option(_AUDIT, "false_alarm")] = None,
    max_noise: Annotated[float | None, option(_AUDIT, "max_noise")] = None,
    permutations: Annotated[int | None, option(_AUDIT, "permutations")] = None,
    concurrency: Annotated[int | None, option(_AUDIT, "concurrency")] = None,
    top_logprobs: Annotated[int | None, option(_AUDIT, "top_logprobs")] = None,
    seeded: Annotated[
        bool, typer.Option("--seeded", help="Give each sampled request a seed of its own.")
    ] = False,
    seed: Annotated[int | None, option(_AUDIT, "seed")] = None,
    api_key_file: ApiKeyFile = None,
    as_json: Json = False,
) -> None:
    """Is a server lossless? Greedy answers token for token, sampled ones by their distribution.

    Exit code 1 if not. Example: dspark audit --url http://localhost:8000/v1 --temperature 1
    """
    from dspark.benchmarks.client_prompts import chats_of
    from dspark.benchmarks.http_api import HttpApi, first_model
    from dspark.benchmarks.server_audit.asking import Side
    from dspark.benchmarks.server_audit.audit import SAME_SERVER, find_reference
    from dspark.benchmarks.server_audit.audit import audit as run
    from dspark.benchmarks.server_audit.config import AuditConfig
    from dspark.benchmarks.server_audit.tables import print_audit, verdict

    config = AuditConfig(
        **given(
            temperature=temperature,
            samples=samples,
            tokens=tokens,
            sampled_prompts=sampled_prompts,
            greedy_tokens=greedy_tokens,
            false_alarm=false_alarm,
            max_noise=max_noise,
            permutations=permutations,
            concurrency=concurrency,
            top_logprobs=top_logprobs,
            seed=seed,
        ),
        seeded=seeded,
    )
    chats = chats_of(prompts, limit=limit)
    api_key = key_of(api_key_file)

    def side_of(base: str, name: str | None) -> Side:
        api = HttpApi(url=base, api_key=api_key)
        return Side(api=api, model=name or first_model(api), top_logprobs=config.top_logprobs)

    side = side_of(url, model)
    other = find_reference(side) if reference is None else side_of(reference, reference_model)
    console = Console(stderr=True)
    with console.status("asking") as status:
        report = run(
            side,
            url=url,
            reference=other,
            reference_name=reference or SAME_SERVER,
            chats=chats,
            config=config,
            say=lambda text: status.update(text),
        )
    print_report(report, print_audit, as_json=as_json)
    if not report.lossless:
        raise NotLosslessError(verdict(report))
