"""What commands do alike: read a list, show progress, print a line of JSON."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.errors import InputError


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


def say_round(console: Console, number: int, name: str, tokens_per_s: float) -> None:
    console.print(f"round {number + 1}  {name}: {tokens_per_s:.1f} tokens/s", style="dim")


def whole_number_in(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name} holds {text!r}, but it must hold whole numbers.") from error


def number_in(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{name} holds {text!r}, but it must hold numbers.") from error


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


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)
