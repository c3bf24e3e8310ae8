"""Options that several commands share: type, name and help of each."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.commands.checks import at_least_one

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
        help="Arithmetic: bf16, fp32, or auto, which is bf16 where it is fast.",
        show_default="auto",
        rich_help_panel="Model",
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
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end-of-text tokens.")
]
RECIPE = "recipes.Recipe"
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
Concurrency = Annotated[
    str, typer.Option(help="Users of closed loads, separated by commas; an empty text: none.")
]
Rates = Annotated[str, typer.Option(help="Requests a second of open loads, separated by commas.")]
Url = Annotated[
    str, typer.Option(help="Base of an OpenAI-compatible server, such as http://localhost:8000/v1.")
]
Model = Annotated[
    str | None,
    typer.Option(help="Name of the model there.", show_default="the first that the server lists"),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(help="File with the key that the server asks for.")
]
ClientPrompts = Annotated[
    Path | None,
    typer.Option(
        help="Prompts in any form that evaluate reads, ShareGPT's among them.",
        show_default="15 built in",
    ),
]


def limit_option(help: str) -> Any:
    """An option that bounds how much of the data is read: a count, or all of it."""
    return typer.Option(help=help, show_default="all", callback=at_least_one)


FileLimit = Annotated[int | None, limit_option("Prompts of each file, from its top.")]
TaskLimit = Annotated[int | None, limit_option("Prompts of each task, from its top.")]
ClientLimit = Annotated[int | None, limit_option("Prompts, at most.")]
