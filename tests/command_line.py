"""`dspark` as a person types it, in this process (fixture `run`)."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from dspark.cli import main


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def complaint(self) -> str:
        """What is said of a mistake: one line, behind nothing but what was being done."""
        *before, last = self.err.splitlines()
        assert set(before) <= {"loading the model", "loading the models"}, self.err
        return last

    def last_json(self) -> dict[str, Any]:
        """The last line of the standard output."""
        value: dict[str, Any] = json.loads(self.out.strip().splitlines()[-1])
        return value


Run = Callable[..., Outcome]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `dspark` with these arguments on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dspark", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call
