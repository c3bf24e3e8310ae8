"""Pictures of an evaluation: which ones appear, and that they are pictures."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark.benchmarks.evaluation_report import DrafterShape, EvaluationReport, report_of
from dspark.benchmarks.journal import Cell, PromptRecord
from dspark.benchmarks.plots import save_plots
from dspark.errors import InputError

pytest.importorskip("matplotlib")


def record(drafter: str, task: str, index: int, *, has_confidence: bool) -> PromptRecord:
    accepted = [index % 3, 1, 2]
    return PromptRecord(
        cell=Cell(drafter=drafter, weights="w", temperature=0.0, width=None, task=task),
        index=index,
        prompt=str(index),
        num_tokens=9,
        seconds=1.0,
        finish_reason="stop",
        offered=[2] * 3,
        planned=[2] * 3,
        accepted=accepted,
        committed=[count + 1 for count in accepted],
        confidence=[[0.5, -0.5], [1.0, 0.0], [2.0, 1.0]] if has_confidence else None,
    )


def report(drafters: Sequence[tuple[str, int, bool]]) -> EvaluationReport:
    return report_of(
        [
            record(name, task, index, has_confidence=has_confidence)
            for name, _, has_confidence in drafters
            for task in ("math", "chat")
            for index in range(3)
        ],
        {
            name: DrafterShape(kind="dspark", layers=layers, block_size=2, width=2)
            for name, layers, _ in drafters
        },
    )


def test_every_picture_that_there_is_something_for_is_written(tmp_path: Path) -> None:
    paths = save_plots(report([("shallow one", 1, True), ("deep", 3, False)]), tmp_path / "plots")
    assert [path.name for path in paths] == [
        "conditional-acceptance-t0.png",
        "thresholds-t0.png",
        "depth-t0.png",
        "reliability-shallow-one-t0.png",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_drafter_without_confidence_or_company_has_one_picture(tmp_path: Path) -> None:
    paths = save_plots(report([("alone", 1, False)]), tmp_path)
    assert [path.name for path in paths] == ["conditional-acceptance-t0.png"]


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        save_plots(report([("alone", 1, False)]), tmp_path)
