"""The command line: parse, build, call one function, print. It decides nothing else.

Heavy modules are imported inside the commands, so that `--help` answers at once and without torch.
"""

import json
import sys
import warnings
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.audit_command import audit
from dspark.errors import DSparkError, InputError
from dspark.options import given, option
from dspark.serve_bench_command import serve as bench_serve
from dspark.serve_command import serve
from dspark.soak_command import soak

app = typer.Typer(
    name="dspark",
    help="A language model answers faster, with exactly the same answers.\n\n"
    "A small drafter proposes a block of tokens, the model checks them all in one pass and keeps "
    "what it would have said itself. Try `dspark demo` first.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(
    help="Measure: speed beside other engines, and what a step costs.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
app.command()(audit)
app.command()(serve)
bench.command("serve")(bench_serve)
bench.command()(soak)

TARGET_HELP = (
    "The model that answers: a directory, a hub name, a .gguf file, or the name of a small one "
    "that is already here."
)
Target = Annotated[
    str | None, typer.Option(help=TARGET_HELP, show_default="smollm2-135m", rich_help_panel="Model")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Directory of a drafter; auto takes the one shipped for the target, prompt-lookup "
        "copies from the text itself, none decodes plainly.",
        show_default="auto",
        rich_help_panel="Model",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Arithmetic: bf16, fp32, or auto, which is bf16 where the processor has it.",
        show_default="auto",
        rich_help_panel="Model",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, or auto.", show_default="auto", rich_help_panel="Model"),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8 stores the weights in 8 bits.", show_default="none", rich_help_panel="Model"
    ),
]
Eager = Annotated[
    bool,
    typer.Option(
        "--eager",
        help="Do not compile the layers: a quicker start, a slower step.",
        rich_help_panel="Model",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Processor threads.", show_default="PyTorch's choice", rich_help_panel="Model"
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="How many drafted tokens are verified: auto weighs confidence, load and measured "
        "costs; fixed, fixed:K, mtp1, threshold:X, table:R=K,R=K and none do not.",
        show_default="auto",
        rich_help_panel="Model",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one line of JSON on the standard output and nothing else."),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Decode without the drafter, to see the difference.")
]
System = Annotated[
    str | None,
    typer.Option(help="System prompt.", show_default="that of the model's own chat template"),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Thinking mode of a chat template that has one.",
        show_default="the template's",
    ),
]

_PARAMS = "core.SamplingParams"
Temperature = Annotated[float | None, option(_PARAMS, "temperature")]
TopK = Annotated[int | None, option(_PARAMS, "top_k")]
TopP = Annotated[float | None, option(_PARAMS, "top_p")]
MinP = Annotated[float | None, option(_PARAMS, "min_p")]
Repetition = Annotated[float | None, option(_PARAMS, "repetition_penalty")]
Presence = Annotated[float | None, option(_PARAMS, "presence_penalty")]
Frequency = Annotated[float | None, option(_PARAMS, "frequency_penalty")]
MaxTokens = Annotated[int | None, option(_PARAMS, "max_tokens")]
MinTokens = Annotated[int | None, option(_PARAMS, "min_tokens")]
Stop = Annotated[list[str] | None, option(_PARAMS, "stop")]
Seed = Annotated[int | None, option(_PARAMS, "seed")]
MaxDraft = Annotated[int | None, option(_PARAMS, "max_draft")]
CouplingName = Annotated[str | None, option(_PARAMS, "coupling")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text tokens.")
]

_DEMO = "benchmarks.demo.DemoConfig"
_STEP = "benchmarks.step.StepConfig"
_TRAIN_BENCH = "benchmarks.training.TrainBenchConfig"
_EXACTNESS = "benchmarks.exactness.ExactnessConfig"
_RACE = "benchmarks.race.RaceConfig"
_CYCLE = "benchmarks.cycle.CycleBenchConfig"
_PLAN = "benchmarks.plan.PlanConfig"
_RECIPE = "recipes.Recipe"
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
_CALIBRATION = "benchmarks.calibration.CalibrationConfig"
_LOAD = "benchmarks.load.config.LoadConfig"
_SIMULATION = "benchmarks.simulation.simulate.SimulationConfig"


_ALL_PEERS = "transformers,llama-cpp,openvino,vllm"
Peers = Annotated[
    str,
    typer.Option(
        help="Other engines, or single configurations of them (llama-cpp-q8_0), separated by "
        "commas; one that is missing is named."
    ),
]
PeerPython = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=PATH", help="Python that has this engine, in place of `bench peers`' own."
    ),
]
Arithmetic = Annotated[
    str, typer.Option(help="Ours in each of these, separated by commas: bf16, fp32, int8.")
]
PromptFileOption = Annotated[
    Path | None,
    typer.Option(help="Prompts, JSON lines, in place of the built-in ones of about 64 tokens."),
]


def main() -> None:
    """The program: a mistake of the user's is one sentence and exit code 1, never a traceback."""
    warnings.showwarning = _note
    try:
        app()
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of a pipe has left
        sys.exit(1)


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"dspark: note: {message}", file=sys.stderr)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        try:
            print(f"dspark {version('dspark')}")
        except PackageNotFoundError:
            print("dspark, not installed")
        raise typer.Exit


@app.callback()
def dspark(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from the input.")],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    policy: Policy = None,
    system: System = None,
    thinking: Thinking = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    plain: Plain = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    presence_penalty: Presence = None,
    frequency_penalty: Frequency = None,
    max_tokens: MaxTokens = None,
    min_tokens: MinTokens = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    seed: Seed = None,
    max_draft: MaxDraft = None,
    coupling: CouplingName = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Colour tokens by how they came to be.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer one prompt. The text goes to the standard output, figures to the error output.

    Example: dspark generate "Why is the sky blue?" --temperature 0
    """
    from dspark import assembly
    from dspark.benchmarks.report import answer_json, stream_answer
    from dspark.core import SamplingParams

    params = SamplingParams(
        **given(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=stop or None,
            seed=seed,
            max_draft=max_draft,
            coupling=_coupling(coupling),
        ),
        ignore_eos=ignore_eos,
    )
    llm = assembly.load_llm(
        target=target,
        drafter="none" if plain else drafter,
        dtype=dtype,
        device=device,
        quantization=quantization,
        is_compiled=not eager,
        threads=threads,
        policy=policy,
        thinking=thinking,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    prompt_ids = assembly.prompt_of(llm, text, system=system, is_raw=raw)
    if as_json:
        _print_json(answer_json(llm, prompt_ids, params))
    else:
        stream_answer(Console(), Console(stderr=True), llm, prompt_ids, params, origins)


@app.command()
def chat(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    policy: Policy = None,
    system: System = None,
    thinking: Thinking = None,
    plain: Plain = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    origins: Annotated[
        bool, typer.Option("--origins", help="Colour tokens by how they came to be.")
    ] = False,
) -> None:
    """Talk with the model in this terminal. /reset forgets, /exit ends, Ctrl-C stops an answer."""
    from dspark import assembly
    from dspark.chat import Conversation, run
    from dspark.core import SamplingParams

    params = SamplingParams(
        **given(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            max_tokens=max_tokens,
            seed=seed,
        )
    )
    console = Console()
    with console.status("loading"):
        llm = assembly.load_llm(
            target=target,
            drafter="none" if plain else drafter,
            dtype=dtype,
            device=device,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
            policy=policy,
            thinking=thinking,
        )
    conversation = Conversation(llm, params, system=system)
    run(
        conversation,
        console=console,
        read=lambda: console.input("[bold]you> [/bold]"),
        shows_origins=origins,
    )


@app.command()
def demo(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    policy: Policy = None,
    temperature: Annotated[float | None, option(_DEMO, "temperature")] = None,
    prompts: Annotated[int | None, option(_DEMO, "num_prompts")] = None,
    max_new_tokens: Annotated[int | None, option(_DEMO, "max_new_tokens")] = None,
    repeats: Annotated[int | None, option(_DEMO, "repeats")] = None,
    seed: Annotated[int | None, option(_DEMO, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Watch the same answers with plain decoding and with DSpark, then compare them in a table.

    Exit code 0 says that every text was the same, or that each difference is a near tie within
    the measured noise of the arithmetic.
    """
    from dspark import assembly
    from dspark.benchmarks.demo import DemoConfig, run
    from dspark.benchmarks.report import DemoScreen, legend, print_demo

    config = DemoConfig(
        **given(
            temperature=temperature,
            num_prompts=prompts,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed,
        )
    )
    console = Console(stderr=as_json)
    with console.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter=drafter,
            dtype=dtype,
            device=device,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
            policy=policy,
        )
    if drafter != "none":
        assembly.require_drafter(llm)
    if not as_json:
        console.print(legend())
    report = run(llm, config, watcher=None if as_json else DemoScreen(console, llm.tokenizer))
    print_demo(console, report)
    if as_json:
        _print_json(report.to_json())
    if not report.verdict.is_pass:
        raise typer.Exit(1)


@app.command()
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
                api_key=None if api_key_file is None else session.key_in(api_key_file),
            )
        else:
            llm = assembly.load_llm(
                target=target,
                drafter="none",
                dtype=dtype,
                device=device,
                quantization=quantization,
                is_compiled=not eager,
                threads=threads,
                max_requests=concurrency,
                thinking=thinking,
            )
            answering = session.embedded(llm, asked, quantization=quantization)
    with _progress(console) as progress:
        bars = _Bars(progress)
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


@app.command()
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
    kind: Annotated[str | None, option(_RECIPE, "kind")] = None,
    num_layers: Annotated[int | None, option(_RECIPE, "num_layers")] = None,
    block_size: Annotated[int | None, option(_RECIPE, "block_size")] = None,
    num_taps: Annotated[int | None, option(_RECIPE, "num_taps")] = None,
    tap_layers: Annotated[str | None, option(_RECIPE, "tap_layers")] = None,
    tap_mixing: Annotated[
        bool | None, option(_RECIPE, "tap_mixing", "--tap-mixing/--no-tap-mixing")
    ] = None,
    markov_rank: Annotated[int | None, option(_RECIPE, "markov_rank")] = None,
    markov_head: Annotated[str | None, option(_RECIPE, "markov_head")] = None,
    draft_vocab_size: Annotated[int | None, option(_RECIPE, "draft_vocab_size")] = None,
    mask_token_id: Annotated[int | None, option(_RECIPE, "mask_token_id")] = None,
    answers_per_step: Annotated[int | None, option(_RECIPE, "answers_per_step")] = None,
    micro_batches: Annotated[int | None, option(_RECIPE, "micro_batches")] = None,
    tokens_per_anchor: Annotated[float | None, option(_RECIPE, "tokens_per_anchor")] = None,
    repeats: Annotated[str | None, option(_RECIPE, "repeats")] = None,
    on_policy: Annotated[float | None, option(_RECIPE, "on_policy")] = None,
    num_held_out: Annotated[int | None, option(_RECIPE, "num_held_out")] = None,
    validate_every: Annotated[int | None, option(_RECIPE, "validate_every")] = None,
    checkpoint_every: Annotated[int | None, option(_RECIPE, "checkpoint_every")] = None,
    seed: Annotated[int | None, option(_RECIPE, "seed")] = None,
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
            _print_json(asdict(found))
        else:
            print(command.describe(found))
        return
    report = command.run(Console(stderr=True))
    if report is None:  # not the first rank
        return
    if as_json:
        _print_json(report.to_json())
    else:
        summary = report.summary
        print(f"{out}: held-out tau {summary.held_out_tau:.3f} after {summary.best_step} steps")


@app.command()
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
            coupling=_coupling(coupling),
        )
    )
    if plots is not None:
        require_matplotlib()
    recorded = assembly.recorded_mode(target, drafter, thinking=thinking, system=system)
    chats = assembly.read_tasks(
        data,
        limit=limit,
        names=None if tasks is None else _names(tasks),
        system=recorded.system,
    )
    console = Console(stderr=True)
    with console.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter="none",
            dtype=dtype,
            device=device,
            quantization=quantization,
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
    with _progress(console) as progress:
        report = run(
            contenders,
            chats,
            config=config,
            journal=journal,
            has_plain=against_plain,
            on_prompt=_Bars(progress).update,
        )
    print_evaluation(console if as_json else Console(), report)
    if plots is not None:
        for path in save_plots(report, plots):
            console.print(f"wrote {path}", style="dim", highlight=False)
    if as_json:
        _print_json(report.to_json())
    if results is None:
        journal.path.unlink()


@app.command()
def simulate(
    records: Annotated[
        list[Path],
        typer.Argument(
            help="Recorded rounds: --record of bench load, or --results of evaluate or bench load."
        ),
    ],
    cost: Annotated[
        Path,
        typer.Option(
            help="Step costs of the machine: a table of `dspark profile`, or one of vLLM or SGLang."
        ),
    ],
    calibration: Annotated[
        Path | None, typer.Option(help="calibration.json of the drafter.", show_default="none")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Which of the recorded temperatures.", show_default="the only one"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="As in bench load.",
            show_default="auto,none,mtp1, every fixed width, threshold:0.5",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Users of closed loads, separated by commas; an empty text: none.")
    ] = "1,2,4,8,16,32,64",
    rates: Annotated[
        str, typer.Option(help="Requests a second of open loads, separated by commas.")
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Arrivals, JSON lines with arrival_s, or with timestamp (Mooncake)."),
    ] = None,
    requests: Annotated[int | None, option(_SIMULATION, "requests")] = None,
    replicas: Annotated[int | None, option(_SIMULATION, "replicas")] = None,
    max_requests: Annotated[int | None, option(_SIMULATION, "max_requests")] = None,
    max_new_tokens: Annotated[int | None, option(_SIMULATION, "max_new_tokens")] = None,
    max_step_tokens: Annotated[int | None, option(_SIMULATION, "max_step_tokens")] = None,
    seed: Annotated[int | None, option(_SIMULATION, "seed")] = None,
    as_json: Json = False,
) -> None:
    """Would it pay on that machine? The scheduler over a table of costs and recorded rounds.

    No model runs. Example: dspark simulate rounds.jsonl --cost h200.json --rates 10,50,200
    """
    from dspark import load_session
    from dspark.benchmarks.load.config import default_policies, policy_names
    from dspark.benchmarks.simulation.arrivals import read_trace
    from dspark.benchmarks.simulation.simulate import SimulationConfig
    from dspark.benchmarks.simulation.simulate import simulate as run
    from dspark.benchmarks.simulation.tables import print_simulation

    machine = load_session.read_machine(
        records, cost=cost, calibration=calibration, temperature=temperature
    )
    names = policy_names(policies) if policies else default_policies(machine.recording.block_size)
    config = SimulationConfig(
        policies=names,
        concurrency=[_whole_number("concurrency", text) for text in _names(concurrency)],
        rates=[_number("rates", text) for text in _names(rates)],
        **given(
            requests=requests,
            replicas=replicas,
            max_requests=max_requests,
            max_new_tokens=max_new_tokens,
            max_step_tokens=max_step_tokens,
            seed=seed,
        ),
    )
    console = Console(stderr=True)
    with console.status("simulating"):
        report = run(machine, config=config, trace=() if trace is None else read_trace(trace))
    print_simulation(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@app.command()
def calibrate(
    data: Annotated[
        list[str],
        typer.Argument(help="Prompts that were not trained on: files or data sets, as in prepare."),
    ],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    temperature: Annotated[
        list[float] | None, option(_CALIBRATION, "temperatures", "--temperature")
    ] = None,
    max_new_tokens: Annotated[int | None, option(_CALIBRATION, "max_new_tokens")] = None,
    seed: Annotated[int | None, option(_CALIBRATION, "seed")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each task, from its top.", show_default="all")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Answers decoded together.")] = 8,
    plots: Annotated[
        Path | None, typer.Option(help="Directory for PNG pictures after Figure 6.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report, and leave the drafter's directory alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit a drafter's confidences to what is accepted; writes calibration.json beside it.

    Each half of the prompts is judged by the fit of the other half; the fit of all is kept.

    Example: dspark calibrate gsm8k.jsonl mt-bench.jsonl --limit 30
    """
    from dspark import artifacts, assembly
    from dspark.benchmarks.calibration import CalibrationConfig
    from dspark.benchmarks.calibration import calibrate as run
    from dspark.benchmarks.plots import require_matplotlib, save_calibration
    from dspark.benchmarks.report import print_calibration

    config = CalibrationConfig(
        **given(temperatures=temperature or None, max_new_tokens=max_new_tokens, seed=seed)
    )
    if plots is not None:
        require_matplotlib()
    folder = assembly.drafter_folder(target, drafter)
    recorded = assembly.recorded_mode(target, [str(folder)], thinking=None, system=None)
    tasks = assembly.read_tasks(data, limit=limit, system=recorded.system)
    console = Console(stderr=True)
    with console.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter=str(folder),
            dtype=dtype,
            device=device,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
            max_requests=concurrency,
            thinking=recorded.thinking,
            policy="fixed",
        )
    with _progress(console) as progress:
        report = run(
            llm,
            [chat for chats in tasks.values() for chat in chats],
            config=config,
            on_prompt=_Bars(progress).update,
        )
    print_calibration(console if as_json else Console(), report)
    if not dry_run:
        path = artifacts.store_calibration(report.calibration, folder)
        console.print(f"wrote {path}", style="dim", highlight=False)
    if plots is not None:
        for path in save_calibration(report, plots):
            console.print(f"wrote {path}", style="dim", highlight=False)
    if as_json:
        _print_json(report.to_json())


@app.command()
def profile(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    requests: Annotated[int, typer.Option(help="Requests of the largest step.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the table, besides the cache.", show_default="none"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what steps cost on this machine; --policy auto finds the table from then on.

    It is done by itself when auto is used first. Exit code 1 says that the table is of no use,
    and why.
    """
    from dspark import artifacts, assembly
    from dspark.algorithms.cost_faults import find_fault
    from dspark.benchmarks.report import print_step_cost

    console = Console(stderr=True)
    with console.status("loading the models"):
        llm = assembly.load_llm(
            target=target,
            drafter=drafter,
            dtype=dtype,
            device=device,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
            max_requests=requests,
        )
    assembly.require_drafter(llm)
    with _progress(console) as progress:
        update = partial(_Bars(progress).update, "numbers of requests")
        cost = llm.step_cost(is_new=True, on_size=update)
    print_step_cost(console if as_json else Console(), cost)
    paths = [artifacts.step_cost_path(cost.fingerprint)]
    if out is not None:
        paths.append(artifacts.store_step_cost(cost, out))
    for path in paths:
        console.print(f"wrote {path}", style="dim", highlight=False)
    if as_json:
        _print_json(cost.to_json())
    fault = find_fault(cost)
    if fault is not None:
        console.print(f"The table is of no use: {fault.reason}", highlight=False)
        raise typer.Exit(1)


@app.command()
def split(
    folder: Annotated[Path, typer.Argument(help="Directory of a drafter.")],
    megabytes: Annotated[float, typer.Option(help="Of each file of weights, at most.")] = 16.0,
) -> None:
    """Store a drafter's weights in files of a limited size, for places that take no large ones."""
    from dspark.models.shards import split_weights

    sizes = split_weights(folder, max_bytes=int(megabytes * 1e6))
    print(f"{folder}: {len(sizes)} files of weights, the largest {max(sizes) / 1e6:.1f} MB")


@bench.command()
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
        arithmetics=_names(arithmetic),
        peers=_names(peers),
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
        on_ready=lambda name: console.print(f"{name} is ready", style="dim"),
        on_round=lambda number, name, rate: _say_round(console, number, name, rate),
    )
    print_single(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command()
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
    sizes = [_whole_number("concurrency", text) for text in _names(concurrency)]
    entry = comparison.race_entry(
        target=target,
        drafter=drafter,
        policy=policy,
        arithmetics=_names(arithmetic),
        peers=_names(peers),
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
        on_ready=lambda name: console.print(f"{name} is ready", style="dim"),
        on_round=lambda number, name, rate: _say_round(console, number, name, rate),
    )
    print_throughput(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command()
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

    Exit code 0 says yes, for every prompt, batch, temperature and arithmetic.

    Example: dspark bench exact gsm8k.jsonl humaneval.jsonl --limit 50
    """
    from dspark import assembly
    from dspark.benchmarks.exactness import ExactnessConfig, measure, report_of
    from dspark.benchmarks.report import print_exactness
    from dspark.data.prompts import read_prompts

    config = ExactnessConfig(
        **given(max_new_tokens=max_new_tokens, reference_batch=reference_batch, seed=seed),
        temperatures=[_number("temperatures", text) for text in _names(temperatures)],
        batches=_names(batches),
        ignore_eos=ignore_eos,
    )
    prompts = [
        prompt.as_chat() for file in data for prompt in read_prompts(file, limit=limit).prompts
    ]
    console, runs = Console(stderr=True), []
    with _progress(console) as progress:
        for name, llm in assembly.load_arithmetics(
            _names(arithmetic),
            target=target,
            drafter=drafter,
            is_compiled=not eager,
            threads=threads,
            max_requests=16,
            policy=policy,
        ):
            assembly.require_drafter(llm)
            bars = _Bars(progress)
            runs += measure(llm, prompts, arithmetic=name, config=config, on_progress=bars.update)
    report = report_of(runs, num_prompts=len(prompts), config=config)
    print_exactness(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())
    if not report.identical:
        raise typer.Exit(1)


@bench.command()
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

    What it costs in accepted length says `dspark evaluate` with and without --quantization int8.
    """
    from dspark import assembly
    from dspark.benchmarks.perplexity import measure, report_of
    from dspark.benchmarks.report import print_perplexity
    from dspark.data.answers import read_answers

    rows = [answer for file in answers for answer in read_answers(file)[:limit]]
    console, found = Console(stderr=True), {}
    with _progress(console) as progress:
        for name, llm in assembly.load_arithmetics(
            _names(arithmetic),
            target=target,
            drafter="none",
            is_compiled=not eager,
            threads=threads,
        ):
            update = partial(_Bars(progress).update, name)
            found[name] = measure(llm.target, rows, on_answer=update)
    report = report_of(found, num_answers=len(rows))
    print_perplexity(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command("peers")
def install_peers(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="llama-cpp, openvino, vllm.", show_default="all of them"),
    ] = None,
) -> None:
    """Install the other engines, each in an environment of its own with fixed versions.

    llama-cpp is compiled here (minutes); the others are about 2 GB each. `bench single` finds them.
    """
    from dspark.benchmarks.peer_setup import PEERS, install

    console = Console(stderr=True)
    for name in names or list(PEERS):
        python = install(name, say=lambda text: console.print(text, highlight=False))
        print(f"{name}: {python}")


@bench.command()
def step(
    target: Target = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
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
            is_compiled=not eager,
            threads=threads,
        )
        plain = assembly.load_target(
            target=target, dtype=dtype, is_compiled=False, is_packed=False, threads=threads
        )

    def say(shape: str, size: int, milliseconds: float) -> None:
        console.print(f"{shape}, {size} tokens: {milliseconds:.2f} ms", style="dim")

    report = measure(loaded, quantization=quantization, config=config, plain=plain, on_size=say)
    print_step(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command()
def cycle(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
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
            target=target, drafter=drafter, dtype=dtype, quantization=quantization, threads=threads
        )
    with console.status("taking steps"):
        report = measure(llm.target, drafter=llm.drafter, quantization=quantization, config=config)
    print_cycle(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command()
def load(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts: files or data sets as in evaluate, each file (or domain in it) counted "
            "as a domain.",
            show_default="15 built-in ones, math, code and chat",
        ),
    ] = None,
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Threads = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="What plans, separated by commas: auto, none, mtp1, fixed:K, threshold:X, "
            "table:R=K,R=K.",
            show_default="auto,none,mtp1, every fixed width, threshold:0.5",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Users of closed loads, separated by commas; an empty text: none.")
    ] = "1,2,4,8,16,32,64",
    rates: Annotated[
        str, typer.Option(help="Requests a second of open loads, separated by commas.")
    ] = "",
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures; the first gives the top-level figures.")
    ] = "1,0",
    repeats: Annotated[int | None, option(_LOAD, "repeats")] = None,
    unit_seconds: Annotated[float | None, option(_LOAD, "unit_s", "--unit-seconds")] = None,
    budget_minutes: Annotated[float | None, option(_LOAD, "budget_minutes")] = None,
    max_new_tokens: Annotated[int | None, option(_LOAD, "max_new_tokens")] = None,
    seed: Annotated[int | None, option(_LOAD, "seed")] = None,
    coupling: Annotated[str | None, option(_LOAD, "coupling")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each domain.", show_default="all")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="File that takes each measurement as it ends; the same file goes on.",
            show_default="in the cache until all is measured",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="File that takes rounds for `dspark simulate`.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Directory for PNG pictures after Figures 7 and 8.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The scheduler and fixed policies under load, interleaved: speed of one user and of all.

    After a crash, or when the minutes are up, the same command goes on. Example: dspark bench
    load --concurrency 1,8 --budget-minutes 5 --plots pictures
    """
    from dspark import assembly, load_session
    from dspark.benchmarks.load.config import LoadConfig, default_policies, policy_names
    from dspark.benchmarks.load.plots import save_load_plots
    from dspark.benchmarks.load.tables import print_load
    from dspark.benchmarks.plots import require_matplotlib

    values = given(
        repeats=repeats,
        unit_s=unit_seconds,
        budget_minutes=budget_minutes,
        max_new_tokens=max_new_tokens,
        seed=seed,
        coupling=_coupling(coupling),
    )
    config = LoadConfig(
        policies=policy_names(policies) if policies else default_policies(1),
        concurrency=[_whole_number("concurrency", text) for text in _names(concurrency)],
        rates=[_number("rates", text) for text in _names(rates)],
        temperatures=[_number("temperatures", text) for text in _names(temperatures)],
        **values,
    )
    if plots is not None:
        require_matplotlib()
    console = Console(stderr=True)
    with console.status("loading the models"):
        llm = assembly.load_llm(
            target=target,
            drafter=drafter,
            dtype=dtype,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
            max_requests=config.most_requests,
        )
    if policies is None:
        config = replace(config, policies=default_policies(llm.block_size))
    report = load_session.run_sweep(
        llm,
        load_session.tasks_of(llm, data or [], limit=limit),
        config=config,
        weights=load_session.drafter_hash(target, drafter),
        quantization=quantization,
        files=load_session.LoadFiles(results=results, record=record),
        on_unit=lambda unit, measured, done: console.print(
            load_session.unit_sentence(unit, measured.tokens_per_s, done, config.num_units),
            style="dim",
            highlight=False,
        ),
    )
    print_load(console if as_json else Console(), report)
    if plots is not None:
        for path in save_load_plots(report, plots):
            console.print(f"wrote {path}", style="dim", highlight=False)
    if as_json:
        _print_json(report.to_json())


@bench.command("train")
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
    print_training(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command()
def plan(
    target: Target = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    eager: Eager = False,
    threads: Annotated[int, typer.Option(help="Processor threads.", rich_help_panel="Model")] = 1,
    requests: Annotated[int | None, option(_PLAN, "requests")] = None,
    block_size: Annotated[int | None, option(_PLAN, "block_size")] = None,
    repeats: Annotated[int | None, option(_PLAN, "repeats")] = None,
    as_json: Json = False,
) -> None:
    """What choosing a budget costs in each step, beside a pass of the target over as many requests.

    Example: dspark bench plan --json
    """
    from dspark import assembly
    from dspark.benchmarks.plan import PlanConfig, measure
    from dspark.benchmarks.report import print_plan

    config = PlanConfig(**given(requests=requests, block_size=block_size, repeats=repeats))
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = assembly.load_target(
            target=target,
            dtype=dtype,
            quantization=quantization,
            is_compiled=not eager,
            threads=threads,
        )
    report = measure(loaded, config=config)
    print_plan(console if as_json else Console(), report)
    if as_json:
        _print_json(report.to_json())


@bench.command("states")
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
    num_layers: Annotated[int | None, option(_RECIPE, "num_layers")] = None,
    num_held_out: Annotated[int | None, option(_RECIPE, "num_held_out")] = None,
    draft_vocab_size: Annotated[int | None, option(_RECIPE, "draft_vocab_size")] = None,
    answers_per_step: Annotated[int | None, option(_RECIPE, "answers_per_step")] = None,
    as_json: Json = False,
) -> None:
    """What int8 hidden states cost in accepted length: one drafter trained twice, then compared."""
    from dspark import assembly, cache_loss
    from dspark.models.target import resolve_source
    from dspark.text.tokenizer import Tokenizer
    from dspark.training_session import read_all_answers

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
        _print_json(values)
    else:
        print(
            f"int8 states: {values['size_ratio']:.0%} of the size, held-out tau "
            f"{found.int8.tau:.3f} against {found.bf16.tau:.3f}, {values['tau_loss']:+.2%} lost"
        )


class _Bars:
    """One progress bar for each task of a command."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._ids: dict[str, Any] = {}

    def update(self, name: str, done: int, total: int) -> None:
        if name not in self._ids:
            self._ids[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._ids[name], completed=done)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _say_round(console: Console, number: int, name: str, tokens_per_s: float) -> None:
    console.print(f"round {number + 1}  {name}: {tokens_per_s:.1f} tokens/s", style="dim")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} holds {text!r}, but it must hold whole numbers.") from error


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{name} holds {text!r}, but it must hold numbers.") from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _coupling(name: str | None) -> Any:
    from dspark.core import Coupling

    if name is None:
        return None
    try:
        return Coupling(name)
    except ValueError as error:
        choices = " or ".join(coupling.value for coupling in Coupling)
        raise InputError(f"coupling is {name!r}, but it must be {choices}.") from error


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)
