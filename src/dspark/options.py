"""What the help of a command says about a setting: the sentence and default of its dataclass field.

Both are read from the source text of the module that owns the field, so that `--help` is quick and
works where torch is missing. It knows no command.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One documented field of a dataclass."""

    sentence: str
    """The string under the field, on one line, without what it says of `None`."""
    default: str | None
    """The default as the source writes it; `None` for a required or absent value."""
    absent: str | None
    """What `None` means, in the string's own words: its ending "; `None`: these words"."""


def owned_field(owner: str, name: str) -> Field:
    """The field `name` of `owner`, written as "core.SamplingParams" relative to this package."""
    return _fields(owner)[name]


@cache
def _fields(owner: str) -> dict[str, Field]:
    module, class_name = owner.rsplit(".", 1)
    path = (_PACKAGE / module.replace(".", "/")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    fields = {}
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text, _, absent = _string(after).partition("; `None`: ")
            fields[node.target.id] = Field(
                sentence=f"{text}." if absent else text,
                default=_default(node.value),
                absent=absent.removesuffix(".") or None,
            )
    return fields


def _string(node: ast.stmt) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
        case _:
            return ""


def _default(node: ast.expr | None) -> str | None:
    if node is None or isinstance(node, ast.Call):
        return None
    if isinstance(node, ast.Attribute):  # a member of an enumeration, typed in lower case
        return node.attr.lower().replace("_", "-")
    value = ast.unparse(node)
    return None if value in ("None", "()", "[]") else value.strip("'")


def option(owner: str, name: str, *flags: str, rich_help_panel: str | None = None) -> Any:
    """A typer option for a field; nothing is passed on unless the user gives it.

    The command's own default is `None`, so that the field's default stays the only one.
    """
    field = owned_field(owner, name)
    return typer.Option(
        *flags,
        help=field.sentence,
        show_default=field.default or field.absent or False,
        rich_help_panel=rich_help_panel,
    )


def given(**values: Any) -> dict[str, Any]:
    """The settings that the user gave: all that are not `None`."""
    return {name: value for name, value in values.items() if value is not None}
