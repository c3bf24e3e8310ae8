"""`dspark evaluate`: how good drafters are. Parses, measures, prints."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    Json,
    System,
    TaskLimit,
    Thinking,
)
from dspark.commands.bundles import Except
from dspark.commands.checks import file_to_write, folder_to_write
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import (
    Bars,
    coupling_of,
    names_in,
    print_report,
    progress_bars,
    say_written,
)
from dspark.options import given, option

_EVALUATION = "benchmarks.evaluation.EvaluationConfig"


def evaluate(
    data: Annotated[
        list[str],
        typer.Argument(help="Prompts that were not trained on: files or data sets, as in prepare."),
    ],
    options: Annotated[ModelOptions, Except("drafter", "policy", "copies")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory of a drafter, auto for the shipped one; several are compared.",
            show_default="auto",
            rich_help_panel="Model",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, option(_EVALUATION, "temperatures", "--temperature")
    ] = None,
    width: Annotated[list[int] | None, option(_EVALUATION, "widths", "--width")] = None,
    max_new_tokens: Annotated[int | None, option(_EVALUATION, "max_new_tokens")] = None,
    batch_size: Annotated[int | None, option(_EVALUATION, "batch_size")] = None,
    seed: Annotated[int | None, option(_EVALUATION, "seed")] = None,
    coupling: Annotated[str | None, option(_EVALUATION, "coupling")] = None,
    limit: TaskLimit = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Only these tasks (file names without .jsonl), separated by commas."),
    ] = None,
    system: System = None,
    thinking: Thinking = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue each prompt as it is, without a chat template."),
    ] = False,
    against_plain: Annotated[
        bool,
        typer.Option(
            "--against-plain", help="Decode plainly too, and say how much faster each drafter is."
        ),
    ] = False,
    heads_off: Annotated[
        bool,
        typer.Option(
            "--heads-off", help="Evaluate again with the sequential head off, to see its worth."
        ),
    ] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            help="File that takes each prompt's rounds as it ends; the same file goes on.",
            show_default="in the cache until the command is done",
            callback=file_to_write,
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Directory for PNG pictures after Figures 2 to 6.", callback=folder_to_write
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """How many tokens a round commits (tau) and which share of the drafted ones, by task.

    Each prompt's result is on the disk when its answer ends; after a crash the same command goes
    on. Example: dspark evaluate gsm8k.jsonl humaneval.jsonl --limit 20 --temperature 0
    --temperature 1
    """
    from dspark import assembly
    from dspark.benchmarks.evaluation import EvaluationConfig, settings_of
    from dspark.benchmarks.evaluation import evaluate as run
    from dspark.benchmarks.evaluation_tables import print_evaluation
    from dspark.benchmarks.plots import require_matplotlib, save_plots

    config = EvaluationConfig(
        **given(
            temperatures=temperature or None,
            widths=width or None,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            seed=seed,
            coupling=coupling_of(coupling),
        )
    )
    if plots is not None:
        require_matplotlib()
    recorded = assembly.recorded_mode(options.target, drafter, thinking=thinking, system=system)
    chats = assembly.read_tasks(
        data,
        limit=limit,
        names=None if tasks is None else names_in(tasks),
        system=recorded.system,
        is_raw=raw,
    )
    assembly.check_drafters(options.target, drafter or ["auto"])
    console = Console(stderr=True)
    llm = replace(options, drafter="none", policy="fixed").load(
        console, max_requests=config.batch_size, thinking=recorded.thinking
    )
    contenders = assembly.contenders(llm, drafter or None, has_heads_off=heads_off)
    settings = {
        **settings_of(llm, config),
        "quantization": options.quantization,
        **asdict(recorded),
    }
    identity = {
        "conditions": [config.temperatures, config.widths, against_plain],
        "weights": {name: contender.weights for name, contender in contenders.items()},
        "tasks": chats,
    }
    journal = assembly.journal_of(results, settings, identity)
    with progress_bars(console) as progress:
        report = run(
            contenders,
            chats,
            config=config,
            journal=journal,
            has_plain=against_plain,
            on_prompt=Bars(progress).update,
        )
    print_report(report, print_evaluation, as_json=as_json)
    if plots is not None:
        say_written(console, save_plots(report, plots))
    if results is None:
        journal.path.unlink()
