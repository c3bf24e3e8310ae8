"""`dspark prepare`, `train`, `evaluate`, `split`: how a drafter comes to be, and how good it is."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    RECIPE,
    Device,
    Dtype,
    Eager,
    Json,
    KVCacheDtype,
    Quantization,
    System,
    Target,
    Thinking,
    Threads,
)
from dspark.commands.shared import (
    Bars,
    coupling_of,
    key_of,
    names_in,
    print_json,
    print_report,
    progress_bars,
    say_written,
)
from dspark.options import given, option

_ENDPOINT = "data.endpoints.EndpointConfig"
_STATES = "training_session.StatesConfig"
_OBJECTIVE = "training.objective.ObjectiveConfig"
_LOSSES = "algorithms.losses.LossWeights"
_POSITIONS = "algorithms.position_weights.PositionWeights"
_OPTIMIZER = "training.optimizer.OptimizerConfig"
_STATES_PANEL = "Hidden states and processes"
_LOSS_PANEL = "Loss and optimiser"
_PLAN_PANEL = "Planning"
_EVALUATION = "benchmarks.evaluation.EvaluationConfig"


def prepare(
    prompts: Annotated[
        list[str],
        typer.Argument(
            help="JSON lines or parquet files, or Hugging Face data sets (NAME or NAME:SPLIT), "
            "with turns, OpenAI messages, ShareGPT conversations or a prompt in each row."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Answers file; an existing one is continued.")],
    target: Target = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    eager: Eager = False,
    threads: Threads = None,
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
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 200,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each file, from its top.", show_default="all")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Ask nothing new after so many minutes.", show_default="no limit"),
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
    concurrency: Annotated[int, typer.Option(help="Answers decoded together.")] = 32,
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
    from dspark import assembly
    from dspark import preparation_session as session
    from dspark.models.embedded import DEFAULT_TARGET

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
        target=DEFAULT_TARGET if target is None else target,
        samplings=samplings,
        max_new_tokens=max_new_tokens,
        seed=seed,
        thinking=thinking,
        system=system,
        is_raw=raw,
    )
    with console.status("loading the model"):
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
            llm = assembly.load_llm(
                target=target,
                drafter="none",
                dtype=dtype,
                device=device,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                is_compiled=not eager,
                threads=threads,
                max_requests=concurrency,
                thinking=thinking,
            )
            answering = session.embedded(llm, asked, quantization=quantization)
    with progress_bars(console) as progress:
        bars = Bars(progress)
        report = session.run(
            files.prompts,
            out,
            answering=answering,
            minutes=minutes,
            on_answer=lambda done, total: bars.update("answers", done, total),
        )
    for line in session.remarks_on(report, answering, files.prompts, out):
        console.print(line, highlight=False)
    print(
        f"{out}: {report.num_answered} answers of {report.num_answer_tokens} tokens added, "
        f"{report.num_done_before} were there, {report.num_prompts} prompts in all"
    )
    if report.failures and not report.num_answered:
        raise typer.Exit(1)


def train(
    answers: Annotated[
        list[Path] | None, typer.Argument(help="Answers files of `dspark prepare`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the drafter; it appears whole.")
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
        typer.Option(help="Drafter to start from; kept where training does not beat it."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it will need, and train nothing.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Directory for the curves, to be read by TensorBoard.")
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


def evaluate(
    data: Annotated[
        list[str],
        typer.Argument(help="Prompts that were not trained on: files or data sets, as in prepare."),
    ],
    target: Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory of a drafter, auto for the shipped one; several are compared.",
            show_default="auto",
            rich_help_panel="Model",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
    eager: Eager = False,
    threads: Threads = None,
    temperature: Annotated[
        list[float] | None, option(_EVALUATION, "temperatures", "--temperature")
    ] = None,
    width: Annotated[list[int] | None, option(_EVALUATION, "widths", "--width")] = None,
    max_new_tokens: Annotated[int | None, option(_EVALUATION, "max_new_tokens")] = None,
    batch_size: Annotated[int | None, option(_EVALUATION, "batch_size")] = None,
    seed: Annotated[int | None, option(_EVALUATION, "seed")] = None,
    coupling: Annotated[str | None, option(_EVALUATION, "coupling")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each task, from its top.", show_default="all")
    ] = None,
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
        ),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Directory for PNG pictures after Figures 2 to 6.")
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
    recorded = assembly.recorded_mode(target, drafter, thinking=thinking, system=system)
    chats = assembly.read_tasks(
        data,
        limit=limit,
        names=None if tasks is None else names_in(tasks),
        system=recorded.system,
        is_raw=raw,
    )
    console = Console(stderr=True)
    with console.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter="none",
            dtype=dtype,
            device=device,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            is_compiled=not eager,
            threads=threads,
            max_requests=config.batch_size,
            thinking=recorded.thinking,
            policy="fixed",
        )
    contenders = assembly.contenders(llm, drafter or None, has_heads_off=heads_off)
    settings = {**settings_of(llm, config), "quantization": quantization, **asdict(recorded)}
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


def split(
    folder: Annotated[Path, typer.Argument(help="Directory of a drafter.")],
    megabytes: Annotated[float, typer.Option(help="Of each file of weights, at most.")] = 16.0,
) -> None:
    """Store a drafter's weights in files of a limited size, for places that take no large ones."""
    from dspark.models.shards import split_weights

    sizes = split_weights(folder, max_bytes=int(megabytes * 1e6))
    print(f"{folder}: {len(sizes)} files of weights, the largest {max(sizes) / 1e6:.1f} MB")
