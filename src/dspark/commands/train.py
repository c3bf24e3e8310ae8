"""`dspark train` and `split`: how a drafter comes to be, and how its weights are stored."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    RECIPE,
    Dtype,
    Json,
    Target,
    Threads,
)
from dspark.commands.checks import above_zero, folder_to_write
from dspark.commands.shared import (
    print_json,
)
from dspark.errors import InputError
from dspark.options import given, option

_STATES = "training_session.StatesConfig"
_OBJECTIVE = "training.objective.ObjectiveConfig"
_LOSSES = "algorithms.losses.LossWeights"
_POSITIONS = "algorithms.position_weights.PositionWeights"
_OPTIMIZER = "training.optimizer.OptimizerConfig"
_STATES_PANEL = "Hidden states and processes"
_LOSS_PANEL = "Loss and optimiser"
_PLAN_PANEL = "Planning"


def train(
    answers: Annotated[
        list[Path] | None, typer.Argument(help="Answers files of `dspark prepare`.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the drafter; it appears whole.", callback=folder_to_write),
    ] = None,
    target: Target = None,
    dtype: Dtype = None,
    threads: Threads = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile the loss: a quicker start, slower.")
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Directory of hidden states and checkpoints; the same command goes on from it.",
            show_default="OUT-work",
            callback=folder_to_write,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimiser steps; give these or --minutes.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Minutes of training, turned into steps once by timing a few."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Where values start from: smollm2 or qwen3-4b.", show_default="general"),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="Drafter to start from, whose shape and vocabulary stay; kept where training "
            "does not beat it."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it will need, and train nothing.")
    ] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the curves, to be read by TensorBoard.", callback=folder_to_write
        ),
    ] = None,
    states: Annotated[str | None, option(_STATES, "states", rich_help_panel=_STATES_PANEL)] = None,
    cache_gb: Annotated[
        float | None, option(_STATES, "cache_gb", rich_help_panel=_STATES_PANEL)
    ] = None,
    cache_dtype: Annotated[
        str | None, option(_STATES, "cache_dtype", rich_help_panel=_STATES_PANEL)
    ] = None,
    target_workers: Annotated[
        int | None, option(_STATES, "target_workers", rich_help_panel=_STATES_PANEL)
    ] = None,
    parallel: Annotated[
        str | None,
        option("training.trainer.TrainConfig", "parallel", rich_help_panel=_STATES_PANEL),
    ] = None,
    kind: Annotated[str | None, option(RECIPE, "kind")] = None,
    num_layers: Annotated[int | None, option(RECIPE, "num_layers")] = None,
    block_size: Annotated[int | None, option(RECIPE, "block_size")] = None,
    num_taps: Annotated[int | None, option(RECIPE, "num_taps")] = None,
    tap_layers: Annotated[str | None, option(RECIPE, "tap_layers")] = None,
    tap_mixing: Annotated[
        bool | None, option(RECIPE, "tap_mixing", "--tap-mixing/--no-tap-mixing")
    ] = None,
    markov_rank: Annotated[int | None, option(RECIPE, "markov_rank")] = None,
    markov_head: Annotated[str | None, option(RECIPE, "markov_head")] = None,
    pair_start: Annotated[
        bool | None, option(RECIPE, "pair_start", "--pair-start/--no-pair-start")
    ] = None,
    state_start: Annotated[
        bool | None, option(RECIPE, "state_start", "--state-start/--no-state-start")
    ] = None,
    draft_vocab_size: Annotated[int | None, option(RECIPE, "draft_vocab_size")] = None,
    mask_token_id: Annotated[int | None, option(RECIPE, "mask_token_id")] = None,
    answers_per_step: Annotated[int | None, option(RECIPE, "answers_per_step")] = None,
    micro_batches: Annotated[int | None, option(RECIPE, "micro_batches")] = None,
    tokens_per_anchor: Annotated[float | None, option(RECIPE, "tokens_per_anchor")] = None,
    repeats: Annotated[str | None, option(RECIPE, "repeats")] = None,
    on_policy: Annotated[float | None, option(RECIPE, "on_policy")] = None,
    num_held_out: Annotated[int | None, option(RECIPE, "num_held_out")] = None,
    validate_every: Annotated[int | None, option(RECIPE, "validate_every")] = None,
    checkpoint_every: Annotated[int | None, option(RECIPE, "checkpoint_every")] = None,
    seed: Annotated[int | None, option(RECIPE, "seed")] = None,
    loss_ce: Annotated[float | None, option(_LOSSES, "ce", rich_help_panel=_LOSS_PANEL)] = None,
    loss_l1: Annotated[float | None, option(_LOSSES, "l1", rich_help_panel=_LOSS_PANEL)] = None,
    loss_confidence: Annotated[
        float | None, option(_LOSSES, "confidence", rich_help_panel=_LOSS_PANEL)
    ] = None,
    loss_kl: Annotated[float | None, option(_LOSSES, "kl", rich_help_panel=_LOSS_PANEL)] = None,
    loss_nla: Annotated[float | None, option(_LOSSES, "nla", rich_help_panel=_LOSS_PANEL)] = None,
    loss_hybrid: Annotated[
        float | None, option(_LOSSES, "hybrid", rich_help_panel=_LOSS_PANEL)
    ] = None,
    position_weights: Annotated[
        str | None, option(_POSITIONS, "kind", rich_help_panel=_LOSS_PANEL)
    ] = None,
    loss_decay: Annotated[
        float | None, option(_POSITIONS, "decay", rich_help_panel=_LOSS_PANEL)
    ] = None,
    dpace_alpha: Annotated[
        float | None, option(_POSITIONS, "alpha", rich_help_panel=_LOSS_PANEL)
    ] = None,
    base_weight: Annotated[
        float | None, option(_OBJECTIVE, "base_weight", rich_help_panel=_LOSS_PANEL)
    ] = None,
    base_until: Annotated[
        float | None, option(_OBJECTIVE, "base_until", rich_help_panel=_LOSS_PANEL)
    ] = None,
    muon_lr: Annotated[
        float | None, option(_OPTIMIZER, "muon_lr", rich_help_panel=_LOSS_PANEL)
    ] = None,
    adam_lr: Annotated[
        float | None, option(_OPTIMIZER, "adam_lr", rich_help_panel=_LOSS_PANEL)
    ] = None,
    num_answers: Annotated[
        int | None,
        typer.Option(help="For --dry-run without files.", rich_help_panel=_PLAN_PANEL),
    ] = None,
    prompt_tokens: Annotated[
        float, typer.Option(help="Mean prompt, for the same.", rich_help_panel=_PLAN_PANEL)
    ] = 100.0,
    answer_tokens: Annotated[
        float, typer.Option(help="Mean answer, for the same.", rich_help_panel=_PLAN_PANEL)
    ] = 200.0,
    tera_flops: Annotated[
        float | None,
        typer.Option(
            help="Matrix products of the machine to plan for, 10^12 operations a second.",
            show_default="measured here",
            callback=above_zero,
            rich_help_panel=_PLAN_PANEL,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a drafter on the target's own answers. Stop at any time; the same command goes on.

    Example: dspark train answers.jsonl --out my-drafter --minutes 120

    Several processes: torchrun --nproc-per-node 4 -m dspark train answers.jsonl --out ..
    """
    from dspark import assembly, training_command

    chosen = assembly.recipe_of(
        recipe,
        given(
            kind=kind,
            num_layers=num_layers,
            block_size=block_size,
            num_taps=num_taps,
            tap_layers=assembly.layers_of(tap_layers),
            tap_mixing=tap_mixing,
            markov_rank=markov_rank,
            markov_head=markov_head,
            pair_start=pair_start,
            state_start=state_start,
            draft_vocab_size=draft_vocab_size,
            mask_token_id=mask_token_id,
            answers_per_step=answers_per_step,
            micro_batches=micro_batches,
            tokens_per_anchor=tokens_per_anchor,
            repeats=assembly.repeats_of(repeats),
            on_policy=on_policy,
            num_held_out=num_held_out,
            validate_every=validate_every,
            checkpoint_every=checkpoint_every,
            seed=seed,
        ),
        objective=given(base_weight=base_weight, base_until=base_until),
        losses=given(
            ce=loss_ce,
            l1=loss_l1,
            confidence=loss_confidence,
            kl=loss_kl,
            nla=loss_nla,
            hybrid=loss_hybrid,
        ),
        positions=given(kind=position_weights, decay=loss_decay, alpha=dpace_alpha),
        optimizer=given(muon_lr=muon_lr, adam_lr=adam_lr),
    )
    command = training_command.TrainingCommand(
        answers=answers or [],
        recipe=chosen,
        states=training_command.StatesConfig(
            **given(
                states=states,
                cache_gb=cache_gb,
                cache_dtype=cache_dtype,
                target_workers=target_workers,
            )
        ),
        out=out,
        work=work,
        steps=steps,
        minutes=minutes,
        init_from=init_from,
        target=target,
        dtype=dtype,
        threads=threads,
        is_compiled=not eager,
        tensorboard=tensorboard,
        **given(parallel=parallel),
    )
    if num_answers is not None and not dry_run:
        raise InputError(f"num_answers is {num_answers}, but only --dry-run plans with amounts.")
    if dry_run:
        found = command.plan(
            num_answers=num_answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            tera_flops=tera_flops,
        )
        if as_json:
            print_json(asdict(found))
        else:
            print(command.describe(found))
        return
    report = command.run(Console(stderr=True))
    if report is None:  # not the first rank
        return
    if as_json:
        print_json(report.to_json())
    else:
        summary = report.summary
        print(f"{out}: held-out tau {summary.held_out_tau:.3f} after {summary.best_step} steps")


def split(
    folder: Annotated[Path, typer.Argument(help="Directory of a drafter.")],
    megabytes: Annotated[float, typer.Option(help="Of each file of weights, at most.")] = 16.0,
) -> None:
    """Store a drafter's weights in files of a limited size, for places that take no large ones."""
    from dspark.models.shards import split_weights

    sizes = split_weights(folder, max_bytes=int(megabytes * 1e6))
    print(f"{folder}: {len(sizes)} files of weights, the largest {max(sizes) / 1e6:.1f} MB")
