"""What an option must hold, asked before anything is loaded or measured: hours may lie between.

Each is the `callback` of a typer option and gives its value back. It knows no command.
"""

import os
from pathlib import Path

import typer

from dspark.errors import InputError


def file_to_write(path: Path | None) -> Path | None:
    """A file that is there or can be made. Raises `InputError` where neither is so."""
    if path is not None:
        if path.is_dir():
            raise InputError(f"{path} is a directory, but a file is to be written; name a file.")
        if path.exists() and not path.is_file():  # a device, which a whole file would replace
            raise InputError(f"{path} is no regular file; name another one.")
        _check_parents(path)
    return path


def folder_to_write(path: Path | None) -> Path | None:
    """A directory that is there or can be made. Raises `InputError` where neither is so."""
    if path is not None:
        if path.exists() and not path.is_dir():
            raise InputError(
                f"{path} is a file, but a directory is to be written; rename one of them."
            )
        _check_parents(path)
    return path


def _check_parents(path: Path) -> None:
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest} is a file, so {path} cannot lie in it; choose another place.")
    if not os.access(path if path.exists() else nearest, os.W_OK):
        raise InputError(f"{path} may not be written by this user; choose another place.")


def at_least_one(option: typer.CallbackParam, value: int | None) -> int | None:
    """A count. Raises `InputError` below 1."""
    if value is not None and value < 1:
        raise InputError(f"{option.name} is {value}, but it must be at least 1.")
    return value


def above_zero(option: typer.CallbackParam, value: float | None) -> float | None:
    """A length of time or a rate. Raises `InputError` for 0, below, and for nan."""
    if value is not None and not value > 0:
        raise InputError(f"{option.name} is {value}, but it must be above 0.")
    return value
