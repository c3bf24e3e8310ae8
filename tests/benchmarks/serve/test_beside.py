"""One table of several servers, and ours over theirs."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dspark.benchmarks.environment import Environment
from dspark.benchmarks.serve.beside import ServersReport, print_servers
from dspark.benchmarks.serve.config import Load, LoadKind, ServeBenchConfig
from dspark.benchmarks.serve.crowd import Crowd
from dspark.benchmarks.serve.point import point_of
from tests.benchmarks.serve.test_serve import broken, streamed

CONFIG = ServeBenchConfig(concurrency=[2], seconds=10.0)
TWO = Load(kind=LoadKind.CLOSED, level=2)


def test_ratios_are_ours_over_theirs_and_failures_have_none() -> None:
    crowd = Crowd(calls=[streamed(1.0, 4, 4, 4, tokens=5)], start_s=0.0, end_s=10.0)
    point = point_of(TWO, crowd, CONFIG)
    assert point.tokens_per_s is not None
    assert point.per_user_tokens_per_s is not None
    slow = replace(
        point,
        tokens_per_s=point.tokens_per_s / 2,
        per_user_tokens_per_s=point.per_user_tokens_per_s / 4,
    )
    dead = point_of(TWO, Crowd(calls=[broken(1.0, "HTTP 500")], start_s=0.0, end_s=10.0), CONFIG)
    report = ServersReport(
        points={"dspark": [point], "slow": [slow], "dead": [dead]},
        missing={"vllm": "dspark bench peers vllm"},
        num_prompts=3,
        config=CONFIG,
        environment=Environment.here(),
    )
    assert report.ratios["dspark/slow"]["2"] == pytest.approx({"tokens_per_s": 2, "per_user": 4})
    assert report.ratios["dspark/dead"] == {"2": {}}
    assert report.has_failed
    assert set(report.to_json()["servers"]) == {"dspark", "slow", "dead"}
    text = io.StringIO()
    print_servers(Console(file=text, width=200), report)
    rows = [line.split() for line in text.getvalue().splitlines() if " slow " in line]
    assert rows[0][-2:] == ["2.00", "4.00"]
    assert "FAILED" in text.getvalue()
    assert "vllm is not installed: dspark bench peers vllm" in text.getvalue()
