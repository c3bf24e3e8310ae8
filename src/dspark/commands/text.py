"""`dspark generate`, `chat` and `demo`: answers for a person who looks on."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import (
    CouplingName,
    Device,
    Drafter,
    Dtype,
    Eager,
    Frequency,
    IgnoreEos,
    Json,
    KVCacheDtype,
    MaxDraft,
    MaxTokens,
    MinP,
    MinTokens,
    Plain,
    Policy,
    Presence,
    Quantization,
    Repetition,
    Seed,
    Stop,
    System,
    Target,
    Temperature,
    Thinking,
    Threads,
    TopK,
    TopP,
)
from dspark.commands.shared import coupling_of, find_costs, print_json
from dspark.options import given, option

_DEMO = "benchmarks.demo.DemoConfig"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from the input.")],
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
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
    from dspark.benchmarks.painter import answer_json, stream_answer
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
            coupling=coupling_of(coupling),
        ),
        ignore_eos=ignore_eos,
    )
    errors = Console(stderr=True)
    with errors.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter="none" if plain else drafter,
            dtype=dtype,
            device=device,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            is_compiled=not eager,
            threads=threads,
            policy=policy,
            thinking=thinking,
        )
    text = sys.stdin.read() if prompt == "-" else prompt
    prompt_ids = assembly.prompt_of(llm, text, system=system, is_raw=raw)
    find_costs(llm, errors)
    if as_json:
        print_json(answer_json(llm, prompt_ids, params))
    else:
        stream_answer(Console(), errors, llm, prompt_ids, params, origins)


def chat(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
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
    with console.status("loading the model"):
        llm = assembly.load_llm(
            target=target,
            drafter="none" if plain else drafter,
            dtype=dtype,
            device=device,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            is_compiled=not eager,
            threads=threads,
            policy=policy,
            thinking=thinking,
        )
    find_costs(llm, console)
    conversation = Conversation(llm, params, system=system)
    run(
        conversation,
        console=console,
        read=lambda: console.input("[bold]you> [/bold]"),
        shows_origins=origins,
    )


def demo(
    target: Target = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = None,
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = None,
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
    from dspark.benchmarks.demo_screen import DemoScreen, print_demo
    from dspark.benchmarks.painter import legend

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
            kv_cache_dtype=kv_cache_dtype,
            is_compiled=not eager,
            threads=threads,
            policy=policy,
        )
    if drafter != "none":
        assembly.require_drafter(llm)
    find_costs(llm, console)
    if not as_json:
        console.print(legend())
    report = run(llm, config, watcher=None if as_json else DemoScreen(console, llm.tokenizer))
    print_demo(console, report)
    if as_json:
        print_json(report.to_json())
    if not report.verdict.is_pass:
        raise typer.Exit(1)
