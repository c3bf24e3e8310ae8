"""The other `dspark bench` commands: speed, exactness and quality, beside other engines."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    RECIPE,
    Arithmetic,
    Drafter,
    Dtype,
    Eager,
    IgnoreEos,
    Json,
    KVCacheDtype,
    PeerPython,
    Peers,
    Policy,
    PromptFileOption,
    Quantization,
    Target,
    Threads,
)
from dspark.commands.shared import (
    Bars,
    names_in,
    numbers_in,
    print_json,
    print_report,
    progress_bars,
    say_ready,
    say_round,
    whole_numbers_in,
)
from dspark.options import given, option

_PREFIX = "benchmarks.prefix.PrefixConfig"
_STEP = "benchmarks.step.StepConfig"
_TRAIN_BENCH = "benchmarks.training.TrainBenchConfig"
_EXACTNESS = "benchmarks.exactness.ExactnessConfig"
_RACE = "benchmarks.race.RaceConfig"
_CYCLE = "benchmarks.cycle.CycleBenchConfig"
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
    from dspark.benchmarks.report import print_single
    from dspark.benchmarks.single import measure

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
    from dspark.benchmarks.report import print_throughput
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
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each file, from its top.", show_default="all")
    ] = None,
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
    from dspark.benchmarks.report import print_exactness
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
    console, runs = Console(stderr=True), []
    with progress_bars(console) as progress:
        for name, llm in assembly.load_arithmetics(
            names_in(arithmetic),
            target=target,
            drafter=drafter,
            is_compiled=not eager,
            threads=threads,
            max_requests=16,
            policy=policy,
        ):
            assembly.require_drafter(llm)
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
    limit: Annotated[
        int | None, typer.Option(help="Answers of each file, from its top.", show_default="all")
    ] = None,
    as_json: Json = False,
) -> None:
    """How well the target predicts given answers in each arithmetic: what int8 costs in quality.

    int8:bf16 is int8 weights with keys and values in bf16.

    What it costs in accepted length says `dspark evaluate` with and without --quantization int8.
    """
    from dspark import assembly
    from dspark.benchmarks.perplexity import measure, report_of
    from dspark.benchmarks.report import print_perplexity
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


def step(
    target: Target = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    eager: Eager = False,
    threads: Threads = None,
    context: Annotated[int | None, option(_STEP, "context")] = None,
    repeats: Annotated[int | None, option(_STEP, "repeats")] = None,
    as_json: Json = False,
) -> None:
    """What one pass of the target costs by its number of tokens, beside the memory's limit.

    Drafting pays where a pass over several tokens costs what a pass over one costs.
    """
    from dspark import assembly
    from dspark.benchmarks.report import print_step
    from dspark.benchmarks.step import StepConfig, measure

    config = StepConfig(**given(context=context, repeats=repeats))
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = assembly.load_target(
            target=target,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            is_compiled=not eager,
            threads=threads,
        )
        plain = assembly.load_target(
            target=target, dtype=dtype, is_compiled=False, is_packed=False, threads=threads
        )

    def say(shape: str, size: int, milliseconds: float) -> None:
        console.print(f"{shape}, {size} tokens: {milliseconds:.2f} ms", style="dim")

    report = measure(loaded, quantization=quantization, config=config, plain=plain, on_size=say)
    print_report(report, print_step, as_json=as_json)


def cycle(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    threads: Threads = None,
    steps: Annotated[int | None, option(_CYCLE, "steps")] = None,
    as_json: Json = False,
) -> None:
    """Which part of a step is bookkeeping, for 1, 16 and 64 requests, with drafting and without."""
    from dspark import assembly
    from dspark.benchmarks.cycle import CycleBenchConfig, measure
    from dspark.benchmarks.report import print_cycle

    config = CycleBenchConfig(**given(steps=steps))
    console = Console(stderr=True)
    with console.status("loading the models"):
        llm = assembly.load_llm(
            target=target,
            drafter=drafter,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
        )
    with console.status("taking steps"):
        report = measure(llm.target, drafter=llm.drafter, quantization=quantization, config=config)
    print_report(report, print_cycle, as_json=as_json)


def bench_train(
    target: Annotated[str | None, option(_TRAIN_BENCH, "target")] = None,
    dtype: Annotated[str | None, option(_TRAIN_BENCH, "dtype")] = None,
    num_samples: Annotated[int | None, option(_TRAIN_BENCH, "num_samples")] = None,
    prompt_tokens: Annotated[int | None, option(_TRAIN_BENCH, "prompt_tokens")] = None,
    answer_tokens: Annotated[int | None, option(_TRAIN_BENCH, "answer_tokens")] = None,
    num_layers: Annotated[int | None, option(_TRAIN_BENCH, "num_layers")] = None,
    block_size: Annotated[int | None, option(_TRAIN_BENCH, "block_size")] = None,
    rank: Annotated[int | None, option(_TRAIN_BENCH, "rank")] = None,
    num_anchors: Annotated[int | None, option(_TRAIN_BENCH, "num_anchors")] = None,
    repeats: Annotated[int | None, option(_TRAIN_BENCH, "repeats")] = None,
    threads: Annotated[int | None, option(_TRAIN_BENCH, "threads")] = None,
    as_json: Json = False,
) -> None:
    """One training step here beside DeepSpec's own, on the same blocks: speed, memory, loss."""
    from dspark.benchmarks.training import TrainBenchConfig, compare
    from dspark.benchmarks.training_table import print_training

    config = TrainBenchConfig(
        **given(
            target=target,
            dtype=dtype,
            num_samples=num_samples,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            num_layers=num_layers,
            block_size=block_size,
            rank=rank,
            num_anchors=num_anchors,
            repeats=repeats,
            threads=threads,
        )
    )
    console = Console(stderr=True)
    with console.status("training a few steps twice"):
        report = compare(config)
    print_report(report, print_training, as_json=as_json)


def bench_states(
    answers: Annotated[list[Path], typer.Argument(help="Answers files of `dspark prepare`.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps of each of the two trainings.")] = 100,
    target: Target = None,
    dtype: Dtype = None,
    threads: Threads = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile the loss: a quicker start, slower.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(help="Where values start from: smollm2 or qwen3-4b.", show_default="general"),
    ] = None,
    num_layers: Annotated[int | None, option(RECIPE, "num_layers")] = None,
    num_held_out: Annotated[int | None, option(RECIPE, "num_held_out")] = None,
    draft_vocab_size: Annotated[int | None, option(RECIPE, "draft_vocab_size")] = None,
    answers_per_step: Annotated[int | None, option(RECIPE, "answers_per_step")] = None,
    as_json: Json = False,
) -> None:
    """What int8 hidden states cost in accepted length: one drafter trained twice, then compared."""
    from dspark import assembly, cache_loss
    from dspark.data.answers import read_all_answers
    from dspark.models.target_source import resolve_source
    from dspark.text.tokenizer import Tokenizer

    values = given(
        num_layers=num_layers,
        num_held_out=num_held_out,
        draft_vocab_size=draft_vocab_size,
        answers_per_step=answers_per_step,
    )
    console = Console(stderr=True)
    loaded = assembly.load_target(
        target=target, dtype=dtype, is_compiled=False, is_packed=None, threads=threads
    )
    found = cache_loss.measure(
        loaded,
        Tokenizer.load(resolve_source(loaded.spec.name)),
        read_all_answers(answers),
        recipe=assembly.recipe_of(recipe, values),
        steps=steps,
        is_compiled=not eager,
        say=lambda text: console.print(text, highlight=False),
    )
    values = found.to_json()
    if as_json:
        print_json(values)
    else:
        print(
            f"int8 states: {values['size_ratio']:.0%} of the size, held-out tau "
            f"{found.int8.tau:.3f} against {found.bf16.tau:.3f}, {values['tau_loss']:+.2%} lost"
        )


def prefix(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    eager: Eager = False,
    threads: Threads = None,
    policy: Policy = None,
    requests: Annotated[int | None, option(_PREFIX, "requests")] = None,
    system_tokens: Annotated[int | None, option(_PREFIX, "system_tokens")] = None,
    max_new_tokens: Annotated[int | None, option(_PREFIX, "max_new_tokens")] = None,
    temperature: Annotated[float | None, option(_PREFIX, "temperature")] = None,
    seed: Annotated[int | None, option(_PREFIX, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Time to the first token with and without the prefix cache, and that no answer changes."""
    from dspark import assembly
    from dspark.benchmarks.prefix import PrefixConfig, measure
    from dspark.benchmarks.report import print_prefix

    config = PrefixConfig(
        **given(
            requests=requests,
            system_tokens=system_tokens,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
    )
    llm = assembly.load_llm(
        target=target,
        drafter=drafter,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        is_compiled=not eager,
        threads=threads,
        policy=policy,
    )
    console = Console(stderr=True)
    with progress_bars(console) as progress:
        report = measure(llm, config, on_request=partial(Bars(progress).update, "requests"))
    print_report(report, print_prefix, as_json=as_json)
