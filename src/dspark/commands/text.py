"""`dspark generate`, `chat` and `demo`: answers for a person who looks on."""

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dspark.commands.arguments import IgnoreEos, Json, Plain, System, Thinking
from dspark.commands.bundles import Except
from dspark.commands.model_options import ModelOptions
from dspark.commands.shared import coupling_of, find_costs, print_json
from dspark.options import given, option

if TYPE_CHECKING:
    from dspark.core import SamplingParams

_DEMO = "benchmarks.demo.DemoConfig"
_PARAMS = "core.SamplingParams"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """A bundle (`commands.bundles`): how tokens are drawn, and when an answer ends."""

    temperature: Annotated[float | None, option(_PARAMS, "temperature")] = None
    top_k: Annotated[int | None, option(_PARAMS, "top_k")] = None
    top_p: Annotated[float | None, option(_PARAMS, "top_p")] = None
    min_p: Annotated[float | None, option(_PARAMS, "min_p")] = None
    repetition_penalty: Annotated[float | None, option(_PARAMS, "repetition_penalty")] = None
    presence_penalty: Annotated[float | None, option(_PARAMS, "presence_penalty")] = None
    frequency_penalty: Annotated[float | None, option(_PARAMS, "frequency_penalty")] = None
    max_tokens: Annotated[int | None, option(_PARAMS, "max_tokens")] = None
    min_tokens: Annotated[int | None, option(_PARAMS, "min_tokens")] = None
    stop: Annotated[list[str] | None, option(_PARAMS, "stop")] = None
    ignore_eos: IgnoreEos = False
    seed: Annotated[int | None, option(_PARAMS, "seed")] = None
    max_draft: Annotated[int | None, option(_PARAMS, "max_draft")] = None
    coupling: Annotated[str | None, option(_PARAMS, "coupling")] = None

    def params(self) -> "SamplingParams":
        """Raises `InputError` for a value that cannot be."""
        from dspark.core import SamplingParams

        read = {"stop": self.stop or None, "coupling": coupling_of(self.coupling)}
        return SamplingParams(**given(**{**asdict(self), **read}))


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from the input.")],
    *,
    options: ModelOptions,
    system: System = None,
    thinking: Thinking = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")
    ] = False,
    plain: Plain = False,
    sampling: SamplingOptions,
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

    params = sampling.params()
    errors = Console(stderr=True)
    chosen = replace(options, drafter="none") if plain else options
    llm = chosen.load(errors, thinking=thinking)
    text = sys.stdin.read() if prompt == "-" else prompt
    prompt_ids = assembly.prompt_of(llm, text, system=system, is_raw=raw)
    find_costs(llm, errors)
    if as_json:
        print_json(answer_json(llm, prompt_ids, params))
    else:
        stream_answer(Console(), errors, llm, prompt_ids, params, origins)


def chat(
    *,
    options: ModelOptions,
    system: System = None,
    thinking: Thinking = None,
    plain: Plain = False,
    sampling: Annotated[
        SamplingOptions,
        Except(
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_tokens",
            "stop",
            "ignore_eos",
            "max_draft",
            "coupling",
        ),
    ],
    origins: Annotated[
        bool, typer.Option("--origins", help="Colour tokens by how they came to be.")
    ] = False,
) -> None:
    """Talk with the model in this terminal. /reset forgets, /exit ends, Ctrl-C stops an answer."""
    from dspark.chat import Conversation, run

    params = sampling.params()
    console, errors = Console(), Console(stderr=True)
    chosen = replace(options, drafter="none") if plain else options
    llm = chosen.load(errors, thinking=thinking)
    find_costs(llm, errors)
    conversation = Conversation(llm, params, system=system)
    run(
        conversation,
        console=console,
        read=lambda: console.input("[bold]you> [/bold]"),
        shows_origins=origins,
    )


def demo(
    options: ModelOptions,
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
    console, errors = Console(stderr=as_json), Console(stderr=True)
    llm = options.load(errors, must_draft=options.drafter != "none")
    find_costs(llm, errors)
    if not as_json:
        console.print(legend())
    report = run(llm, config, watcher=None if as_json else DemoScreen(console, llm.tokenizer))
    print_demo(console, report)
    if as_json:
        print_json(report.to_json())
    if not report.verdict.is_pass:
        raise typer.Exit(1)
