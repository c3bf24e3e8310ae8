"""Options that many commands spell alike, spelt once: a dataclass whose fields typer sees singly.

It knows no command and no option.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Except:
    """Beside a bundle in `Annotated`: fields that this command has no option for."""

    names: frozenset[str]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", frozenset(names))


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: each parameter that is a dataclass became its fields, there.

    The command itself is called with the dataclass. Its fields need a default and an annotation as
    a parameter has it.
    """
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = getattr(parameter.annotation, "__origin__", parameter.annotation)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        options = _options(kind, getattr(parameter.annotation, "__metadata__", ()))
        parameters += options
        bundles[name] = kind, [option.name for option in options]

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (kind, names) in bundles.items():
            values[name] = kind(**{each: values.pop(each) for each in names})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _options(kind: Any, marks: tuple[Any, ...]) -> list[inspect.Parameter]:
    left_out = frozenset[str]().union(*(m.names for m in marks if isinstance(m, Except)))
    hints = get_type_hints(kind, include_extras=True)
    assert left_out <= hints.keys(), f"{kind.__name__} has no {left_out - hints.keys()}"
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
        if field.name not in left_out
    ]
