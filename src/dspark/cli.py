"""The command line: which commands there are, and what becomes of a user's mistake."""

import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from dspark.commands import planning, races, speed, text, training_benches
from dspark.commands.audit import audit
from dspark.commands.bench_serve import serve as bench_serve
from dspark.commands.bundles import flattened
from dspark.commands.evaluate import evaluate
from dspark.commands.overhead import overhead
from dspark.commands.prepare import prepare
from dspark.commands.serve import serve
from dspark.commands.servers import servers
from dspark.commands.soak import soak
from dspark.commands.train import split, train
from dspark.errors import DSparkError, Stopped

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
_COMMANDS: tuple[Callable[..., None], ...] = (
    text.generate,
    text.chat,
    text.demo,
    serve,
    prepare,
    train,
    planning.calibrate,
    planning.profile,
    evaluate,
    audit,
    planning.simulate,
    split,
)
_BENCHES: dict[str, Callable[..., None]] = {
    "single": races.single,
    "throughput": races.throughput,
    "load": planning.load,
    "serve": bench_serve,
    "servers": servers,
    "overhead": overhead,
    "soak": soak,
    "exact": speed.exact,
    "perplexity": speed.perplexity,
    "prefix": speed.prefix,
    "step": speed.step,
    "cycle": speed.cycle,
    "plan": planning.plan,
    "train": training_benches.bench_train,
    "states": training_benches.bench_states,
    "peers": races.install_peers,
}
for command in _COMMANDS:
    app.command()(flattened(command))
for name, command in _BENCHES.items():
    bench.command(name)(flattened(command))


def main() -> None:
    """The program: a mistake of the user's is one sentence and exit code 1, never a traceback."""
    warnings.showwarning = _note
    try:
        app()
    except DSparkError as error:
        print(f"dspark: {error}", file=sys.stderr)
        sys.exit(130 if isinstance(error, Stopped) else 1)
    except BrokenPipeError:  # the reader of a pipe has left
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # no file of the user's
            raise
        print(f"dspark: {error.filename} cannot be used: {error.strerror}.", file=sys.stderr)
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
