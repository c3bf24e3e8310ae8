"""`dspark bench step`, `cycle`, `prefix`, `exact` and `perplexity`: our engine alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    Arithmetic,
    Drafter,
    Eager,
    FileLimit,
    IgnoreEos,
    Json,
    Target,
    Threads,
    limit_option,
)
from dspark.commands.bundles import Except
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import (
    Bars,
    names_in,
    numbers_in,
    print_report,
    progress_bars,
    working,
)
from dspark.options import given, option

_PREFIX = "benchmarks.prefix.PrefixConfig"
_STEP = "benchmarks.step.StepConfig"
_EXACTNESS = "benchmarks.exactness.ExactnessConfig"
_CYCLE = "benchmarks.cycle.CycleBenchConfig"


def exact(
    data: Annotated[list[Path], typer.Argument(help="Prompt files (JSON lines).")],
    target: Target = None,
    drafter: Drafter = None,
    policy: Annotated[
        str, typer.Option(help="How much is verified, as in `dspark generate`.")
    ] = "fixed",
    arithmetic: Arithmetic = "bf16,int8",
    eager: Eager = False,
    threads: Threads = None,
    limit: FileLimit = None,
    temperatures: Annotated[
        str, typer.Option(help="Separated by commas; above 0 each prompt has a seed.")
    ] = "0,1",
    batches: Annotated[
        str,
        typer.Option(
            help="Requests decoded together, separated by commas; mixed lets them come and go, "
            "some with fewer drafts."
        ),
    ] = "1,4,16,mixed",
    max_new_tokens: Annotated[int | None, option(_EXACTNESS, "max_new_tokens")] = None,
    reference_batch: Annotated[int | None, option(_EXACTNESS, "reference_batch")] = None,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int | None, option(_EXACTNESS, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Is every answer with a drafter, token for token, the one of plain decoding?

    Exit code 0 says yes, for every prompt, batch, temperature and arithmetic, and that drafts
    were verified in each of them.

    Example: dspark bench exact gsm8k.jsonl humaneval.jsonl --limit 50
    """
    from dspark import assembly
    from dspark.benchmarks.exactness import ExactnessConfig, measure, report_of
    from dspark.benchmarks.tables import print_exactness
    from dspark.data.prompts import read_prompts

    config = ExactnessConfig(
        **given(max_new_tokens=max_new_tokens, reference_batch=reference_batch, seed=seed),
        temperatures=numbers_in("temperatures", temperatures),
        batches=names_in(batches),
        ignore_eos=ignore_eos,
    )
    prompts = [
        prompt.as_chat() for file in data for prompt in read_prompts(file, limit=limit).prompts
    ]
    assembly.check_drafters(target, [drafter or "auto"])
    console, runs = Console(stderr=True), []
    with progress_bars(console) as progress:
        for name, llm in assembly.load_arithmetics(
            names_in(arithmetic),
            target=target,
            drafter=drafter,
            is_compiled=not eager,
            threads=threads,
            max_requests=config.most_requests,
            policy=policy,
        ):
            bars = Bars(progress)
            runs += measure(llm, prompts, arithmetic=name, config=config, on_progress=bars.update)
    report = report_of(runs, num_prompts=len(prompts), config=config)
    print_report(report, print_exactness, as_json=as_json)
    if not (report.identical and report.conclusive):
        raise typer.Exit(1)


def perplexity(
    answers: Annotated[list[Path], typer.Argument(help="Answers files of `dspark prepare`.")],
    target: Target = None,
    arithmetic: Arithmetic = "fp32,bf16,int8",
    eager: Eager = False,
    threads: Threads = None,
    limit: Annotated[int | None, limit_option("Answers of each file, from its top.")] = None,
    as_json: Json = False,
) -> None:
    """How well the target predicts given answers in each arithmetic: what int8 costs in quality.

    int8:bf16 is int8 weights with keys and values in bf16.

    What it costs in accepted length says `dspark evaluate` with and without --quantization int8.
    """
    from dspark import assembly
    from dspark.benchmarks.perplexity import measure, report_of
    from dspark.benchmarks.tables import print_perplexity
    from dspark.data.answers import read_answers

    rows = [answer for file in answers for answer in read_answers(file)[:limit]]
    console, found = Console(stderr=True), {}
    with progress_bars(console) as progress:
        for name, llm in assembly.load_arithmetics(
            names_in(arithmetic),
            target=target,
            drafter="none",
            is_compiled=not eager,
            threads=threads,
        ):
            update = partial(Bars(progress).update, name)
            found[name] = measure(llm.target, rows, on_answer=update)
    report = report_of(found, num_answers=len(rows))
    print_report(report, print_perplexity, as_json=as_json)


def step(
    options: Annotated[ModelOptions, Except("drafter", "device", "policy", "copies")],
    context: Annotated[int | None, option(_STEP, "context")] = None,
    repeats: Annotated[int | None, option(_STEP, "repeats")] = None,
    as_json: Json = False,
) -> None:
    """What one pass of the target costs by its number of tokens, beside the memory's limit.

    Drafting pays where a pass over several tokens costs what a pass over one costs.
    """
    from dspark.benchmarks.step import StepConfig, measure
    from dspark.benchmarks.tables import print_step

    config = StepConfig(**given(context=context, repeats=repeats))
    console = Console(stderr=True)
    bare = replace(options, quantization=None, kv_cache_dtype=None, eager=True)
    with working(console, "loading the model"):
        loaded = options.load_target()
        plain = bare.load_target(is_packed=False)

    def say(shape: str, size: int, milliseconds: float) -> None:
        console.print(f"{shape}, {size} tokens: {milliseconds:.2f} ms", style="dim")

    report = measure(
        loaded, quantization=options.quantization, config=config, plain=plain, on_size=say
    )
    print_report(report, print_step, as_json=as_json)


def cycle(
    options: Annotated[ModelOptions, Except("device", "eager", "policy", "copies")],
    steps: Annotated[int | None, option(_CYCLE, "steps")] = None,
    as_json: Json = False,
) -> None:
    """Which part of a step is bookkeeping, for 1, 16 and 64 requests, with drafting and without."""
    from dspark.benchmarks.cycle import CycleBenchConfig, measure
    from dspark.benchmarks.tables import print_cycle

    config = CycleBenchConfig(**given(steps=steps))
    console = Console(stderr=True)
    llm = options.load(console)
    with console.status("taking steps"):
        report = measure(
            llm.target, drafter=llm.drafter, quantization=options.quantization, config=config
        )
    print_report(report, print_cycle, as_json=as_json)


def prefix(
    options: Annotated[ModelOptions, Except("device", "copies")],
    requests: Annotated[int | None, option(_PREFIX, "requests")] = None,
    system_tokens: Annotated[int | None, option(_PREFIX, "system_tokens")] = None,
    max_new_tokens: Annotated[int | None, option(_PREFIX, "max_new_tokens")] = None,
    temperature: Annotated[float | None, option(_PREFIX, "temperature")] = None,
    seed: Annotated[int | None, option(_PREFIX, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token with and without the prefix cache, and that no answer changes."""
    from dspark.benchmarks.prefix import PrefixConfig, measure
    from dspark.benchmarks.tables import print_prefix

    config = PrefixConfig(
        **given(
            requests=requests,
            system_tokens=system_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
    )
    console = Console(stderr=True)
    llm = options.load(console)
    with progress_bars(console) as progress:
        report = measure(llm, config, on_request=partial(Bars(progress).update, "requests"))
    print_report(report, print_prefix, as_json=as_json)
