"""`dspark bench train` and `bench states`: what training costs, beside another and with a cache."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import RECIPE, Dtype, Json, Target, Threads
from dspark.commands.shared import print_json, print_report
from dspark.options import given, option

_TRAIN_BENCH = "benchmarks.training.TrainBenchConfig"


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
