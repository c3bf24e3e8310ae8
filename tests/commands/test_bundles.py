"""Options that are spelt once reach the command as one value, and typer as one option each."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from dspark.commands.bundles import Except, flattened


@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    colour: Annotated[str, typer.Option(help="Of the paint.")] = "red"
    coats: Annotated[int, typer.Option(help="One on another.")] = 1


def test_the_fields_stand_where_the_bundle_stood_and_the_command_gets_it_whole() -> None:
    calls = []

    def command(wall: int, *, paint: Paint, dry: bool = False) -> None:
        calls.append((wall, paint, dry))

    call = flattened(command)
    parameters = inspect.signature(call).parameters
    assert list(parameters) == ["wall", "colour", "coats", "dry"]
    assert parameters["coats"].default == 1
    assert parameters["colour"].annotation.__metadata__[0].help == "Of the paint."
    call(wall=3, colour="blue", coats=2, dry=True)
    assert calls == [(3, Paint(colour="blue", coats=2), True)]


def test_a_field_left_out_is_no_option_and_keeps_its_default() -> None:
    calls = []

    def command(paint: Annotated[Paint, Except("colour")]) -> None:
        calls.append(paint)

    call = flattened(command)
    assert list(inspect.signature(call).parameters) == ["coats"]
    call(coats=4)
    assert calls == [Paint(coats=4)]


def test_a_field_that_is_not_there_cannot_be_left_out() -> None:
    def command(paint: Annotated[Paint, Except("brush")]) -> None: ...

    with pytest.raises(AssertionError, match=r"Paint has no \{'brush'\}"):
        flattened(command)
