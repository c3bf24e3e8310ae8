"""`dspark prepare`: what a drafter learns from. Parses, asks, prints."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    FileLimit,
    System,
    Thinking,
)
from dspark.commands.bundles import Except
from dspark.commands.checks import above_zero, at_least_one, file_to_write
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import Bars, key_of, progress_bars
from dspark.errors import InputError, Stopped
from dspark.interrupts import polite_stop
from dspark.options import given, option

_ENDPOINT = "data.endpoints.EndpointConfig"


def prepare(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="JSON lines or parquet files, or Hugging Face data sets (NAME or NAME:SPLIT), "
            "with turns, OpenAI messages, ShareGPT conversations or a prompt in each row."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Answers file; an existing one is continued.", callback=file_to_write),
    ],
    options: Annotated[ModelOptions, Except("drafter", "policy", "copies")],
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=COLUMN where a column has another name; KEY is id, domain, system, turns, "
            "messages, conversations or prompt."
        ),
    ] = None,
    system: System = None,
    thinking: Thinking = None,
    sampling: Annotated[
        list[str],
        typer.Option(
            help="Temperature, or temperature:top_p:top_k:min_p from the left; several take turns "
            "over prompts."
        ),
    ] = ["0.7:0.95", "1.0"],  # noqa: B006 (typer copies it)
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer, at most.", callback=at_least_one)
    ] = 200,
    limit: FileLimit = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Ask nothing new after so many minutes.",
            show_default="no limit",
            callback=above_zero,
        ),
    ] = None,
    first_turn: Annotated[
        bool, typer.Option("--first-turn", help="Answer the first turn of a conversation only.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue each prompt as it is, without a chat template: base models."
        ),
    ] = False,
    concurrency: Annotated[
        int, typer.Option(help="Answers decoded together.", callback=at_least_one)
    ] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next has the next.")] = 0,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Base of an OpenAI-compatible server of the target, such as "
            "http://localhost:8000/v1, instead of decoding here; several share the work.",
            rich_help_panel="Servers",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Name of the target there.", show_default="--target", rich_help_panel="Servers"
        ),
    ] = None,
    retries: Annotated[int | None, option(_ENDPOINT, "retries", rich_help_panel="Servers")] = None,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            help="Ask the server for the ids it generated (return_token_ids, as vLLM has it).",
            rich_help_panel="Servers",
        ),
    ] = False,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the key of the servers.", rich_help_panel="Servers"),
    ] = None,
) -> None:
    """Let the target answer prompts: what a drafter learns from. Stop and go on at any time.

    Every assistant turn is answered anew, each exactly once; rows that cannot be asked and turns
    that cannot be answered are counted and named.
    """
    from dspark import preparation_session as session
    from dspark.models.embedded import DEFAULT_TARGET

    servers = {
        "model": model,
        "retries": retries,
        "token_ids": token_ids or None,
        "api_key_file": api_key_file,
    }
    for name, value in servers.items():
        if value is not None and not endpoint:
            raise InputError(f"{name} is {value}, but no server is asked; give one by --endpoint.")
    samplings = [session.sampling_of(text) for text in sampling]
    console = Console(stderr=True)
    files = session.read_prompt_files(
        prompts,
        limit=limit,
        columns=session.columns_of(column or ()),
        system=system,
        has_all_turns=not first_turn,
        is_raw=raw,
    )
    for line in files.remarks:
        console.print(line, highlight=False)
    asked = session.Asked(
        target=DEFAULT_TARGET if options.target is None else options.target,
        samplings=samplings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        thinking=thinking,
        system=system,
        is_raw=raw,
    )
    if endpoint:
        answering = session.over_http(
            asked,
            **given(retries=retries),
            urls=endpoint,
            model=asked.target if model is None else model,
            concurrency=concurrency,
            has_token_ids=token_ids,
            api_key=key_of(api_key_file),
        )
    else:
        llm = replace(options, drafter="none").load(
            console, max_requests=concurrency, thinking=thinking
        )
        answering = session.embedded(llm, asked, quantization=options.quantization)
    notice = "nothing new is asked; what is in hand still ends, or Ctrl-C once more"
    with (
        progress_bars(console) as progress,
        polite_stop(lambda: progress.console.print(notice)) as should_stop,
    ):
        bars = Bars(progress)
        report = session.run(
            files.prompts,
            out,
            answering=answering,
            minutes=minutes,
            on_answer=lambda done, total: bars.update("answers", done, total),
            should_stop=should_stop,
        )
        is_stopped = should_stop()
    for line in session.remarks_on(report, answering, files.prompts, out):
        console.print(line, highlight=False)
    print(
        f"{out}: {report.num_answered} answers of {report.num_answer_tokens} tokens added, "
        f"{report.num_done_before} were there, {report.num_prompts} prompts in all"
    )
    if is_stopped:
        raise Stopped("Stopped; the same command goes on with the turns that are left.")
    if report.failures and not report.num_answered:
        raise typer.Exit(1)
