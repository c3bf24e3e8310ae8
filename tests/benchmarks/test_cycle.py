import json

import pytest

from dspark.benchmarks.cycle import CycleBenchConfig, CycleRow, measure
from dspark.errors import InputError
from dspark.llm import LLM


def test_the_report_tells_operators_from_bookkeeping(llm: LLM) -> None:
    heard: list[CycleRow] = []
    config = CycleBenchConfig(num_requests=(1, 3), prompt_tokens=4, steps=3, warmup=1)
    report = measure(
        llm.target, drafter=llm.drafter, quantization=None, config=config, on_row=heard.append
    )
    assert [(row.num_requests, row.is_drafting) for row in report.rows] == [
        (1, True),
        (1, False),
        (3, True),
        (3, False),
    ]
    assert heard == report.rows
    for row in report.rows:
        assert row.tokens_per_step >= row.num_requests
        assert row.num_calls >= len(row.operators_ms) > 0
        assert sum(row.operators_ms.values()) > 0
        assert row.outside_ms == pytest.approx(row.step_ms * row.outside_share)
    line = json.loads(json.dumps(report.to_json()))
    assert line["rows"][0].keys() >= {"step_ms", "operators_ms", "outside_share"}


def test_more_steps_than_positions_are_refused(llm: LLM) -> None:
    config = CycleBenchConfig(num_requests=(1,), steps=100_000)
    with pytest.raises(InputError, match="time fewer steps"):
        measure(llm.target, drafter=None, quantization=None, config=config)


@pytest.mark.parametrize("changes", [{"num_requests": ()}, {"steps": 0}, {"prompt_tokens": 0}])
def test_impossible_measurements_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        CycleBenchConfig(**changes)  # type: ignore[arg-type]
