"""What commands do alike: read a list, show progress, print a report."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.errors import InputError

if TYPE_CHECKING:
    from dspark.llm import LLM

_N = TypeVar("_N", int, float)


class Bars:
    """One progress bar for each task of a command."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._ids: dict[str, Any] = {}

    def update(self, name: str, done: int, total: int) -> None:
        if name not in self._ids:
            self._ids[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._ids[name], completed=done)


def progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def working(console: Console, words: str) -> Iterator[None]:
    """Says what takes its time: on a terminal while it lasts, in a log as a line that stays."""
    if console.is_terminal:
        with console.status(words):
            yield
    else:
        console.print(words, highlight=False, soft_wrap=True)
        yield


def find_costs(llm: "LLM", console: Console) -> str:
    """Where the step costs of this LLM's policy come from; those that are missing are measured now.

    Otherwise the first request would wait for them, and nobody would know why.
    """
    from dspark.algorithms.policies import Adaptive, parse_policy

    if llm.drafter is None or not isinstance(parse_policy(llm.policy), Adaptive):
        return "no cost table is needed"
    if llm.stored_step_cost() is not None:
        return "step costs from the cache"
    with working(console, "measuring what steps cost on this machine, once: half a minute or so"):
        llm.step_cost()
    return "step costs measured now"


def say_ready(console: Console, name: str) -> None:
    console.print(f"{name} is ready", style="dim")


def say_round(console: Console, number: int, name: str, tokens_per_s: float) -> None:
    console.print(f"round {number + 1}  {name}: {tokens_per_s:.1f} tokens/s", style="dim")


def say_written(console: Console, paths: Iterable[Path]) -> None:
    for path in paths:
        console.print(f"wrote {path}", style="dim", highlight=False)


def whole_numbers_in(name: str, text: str) -> list[int]:
    return [_number(name, part, int, "whole numbers") for part in names_in(text)]


def numbers_in(name: str, text: str) -> list[float]:
    return [_number(name, part, _finite, "finite numbers") for part in names_in(text)]


def _number(name: str, text: str, form: Callable[[str], _N], words: str) -> _N:
    try:
        return form(text)
    except ValueError as error:
        raise InputError(f"{name} holds {text!r}, but it must hold {words}.") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def coupling_of(name: str | None) -> Any:
    from dspark.core import Coupling

    if name is None:
        return None
    try:
        return Coupling(name)
    except ValueError as error:
        choices = " or ".join(coupling.value for coupling in Coupling)
        raise InputError(f"coupling is {name!r}, but it must be {choices}.") from error


def key_of(file: Path | None) -> str | None:
    """The key of a server that `--api-key-file` holds."""
    from dspark.preparation_session import key_in

    return None if file is None else key_in(file)


class Report(Protocol):
    """What a measuring command found."""

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""


_R = TypeVar("_R", bound=Report)


def print_report(report: _R, table: Callable[[Console, _R], None], *, as_json: bool) -> None:
    """The table for people; with `--json` it goes to the error output, before the line of JSON."""
    table(Console(stderr=as_json), report)
    if as_json:
        print_json(report.to_json())


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)
