"""A results file that outlives a crash: settings in its first line, then one line a result.

It knows lines of JSON, not what they mean. A line cut by a kill is dropped and measured again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.data.durable_rows import append_row, is_unfinished_header
from dspark.errors import InputError


class ResultsFile:
    """Opens or begins a file; `rows` are the results that it holds already."""

    def __init__(self, path: str | Path, *, settings: Mapping[str, Any], owner: str) -> None:
        """`owner` names, for messages, what the results are of ("an evaluation").

        Raises `InputError` if the file holds results of other settings, or none at all.
        """
        self.path = Path(path)
        self._owner = owner
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: Sequence[Mapping[str, Any]] = self._resume(settings)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a line and wait until it is on the disk."""
        append_row(self.path, row, rows="results", kept="results")

    def foreign(self, number: int) -> InputError:
        """What to raise for row `number`, from 1 on, if it makes no sense."""
        return InputError(
            f"{self.path} line {number + 1} is no result of {self._owner}; name another results "
            "file."
        )

    def _resume(self, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        raw = self.path.read_bytes() if self.path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if not whole:
            if not is_unfinished_header(raw, "settings"):
                raise self.foreign(0)
            self.path.write_bytes(b"")
            self.add({"settings": dict(settings)})
            return []
        rows = [self._row(number, line) for number, line in enumerate(whole.splitlines())]
        if len(rows) == 1 and isinstance(rows[0].get("settings"), dict):  # no result to go on from
            self.path.write_bytes(b"")
            self.add({"settings": dict(settings)})
            return []
        self._check_settings(rows[0].get("settings"), settings)
        if len(whole) < len(raw):  # and now it is known to be ours
            os.truncate(self.path, len(whole))
        return rows[1:]

    def _row(self, number: int, line: bytes) -> Mapping[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise self.foreign(number) from error
        if not isinstance(row, dict):
            raise self.foreign(number)
        return row

    def _check_settings(self, found: Any, wanted: Mapping[str, Any]) -> None:
        if not isinstance(found, dict):
            raise self.foreign(0)
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                raise InputError(
                    f"{self.path} holds results with {name} {found.get(name)!r}, and now it is "
                    f"{wanted.get(name)!r}; name another results file, or take the same settings."
                )
