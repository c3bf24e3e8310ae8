"""Prometheus text, and the dashboard that reads it."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.core import Origin, RoundResult, StepResult
from dspark.engine.load import Load
from dspark.engine.planner import FixedPlanner, PlanRecord
from dspark.serving.histogram import Histogram
from dspark.serving.metrics import Gauges, Meter, Metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def a_round(*, offered: int, planned: int, accepted: int) -> RoundResult:
    tokens = [1] * (accepted + 1)
    return RoundResult(
        request_id="r",
        token_ids=tokens,
        origins=[Origin.PLAIN] * len(tokens),
        logprobs=None,
        num_offered=offered,
        num_planned=planned,
        num_accepted=accepted,
        is_prefill=False,
        finish_reason=None,
    )


def a_record(**changes: object) -> PlanRecord:
    values: dict[str, object] = {
        "num_requests": 2,
        "num_drafting": 1,
        "num_prompt_tokens": 0,
        "lengths": [2, 0],
        "accepted": [1, 0],
        "why": "drafted",
        "plain_rate": None,
        "predicted_tokens": 3.5,
        "predicted_seconds": 0.02,
        "seconds": 0.03,
    }
    return PlanRecord(**{**values, **changes})  # type: ignore[arg-type]


def gauges() -> Gauges:
    load = Load(
        num_waiting=3,
        num_reading=1,
        num_decoding=2,
        max_requests=4,
        num_pages=10,
        num_free_pages=5,
        num_cached_pages=2,
        page_size=8,
        total_prompt_tokens=100,
        total_cached_tokens=40,
        total_sent_back=1,
        total_broken_drafts=1,
    )
    return Gauges(num_open=6, load=load, policy="auto")


@pytest.fixture
def meter() -> Meter:
    found = Meter(block_size=4)
    planner = FixedPlanner.of_width(None)
    rounds = [a_round(offered=4, planned=n, accepted=a) for n, a in ((0, 0), (2, 2), (4, 4))]
    step = StepResult(rounds=rounds, num_prompt_tokens=7, num_verify_tokens=9)
    found.step(step, 0.02, planner)
    planner.records.extend([a_record(), a_record(why="plain", num_drafting=0)])
    found.read_plans(planner)
    found.read_plans(planner)  # nothing new
    return found


def values_of(meter: Meter) -> dict[str, float]:
    metrics = Metrics(meter, gauges)
    metrics.count_response("/v1/completions", 200)
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = "".join(f"/{value}" for value in sample.labels.values())
            found[sample.name + labels] = sample.value
    return found


def test_rounds_are_counted_by_position_and_tau_is_their_ratio(meter: Meter) -> None:
    """UC-147: the trace (0, 2, 4 accepted) has mean length 3 with the target's own token."""
    found = values_of(meter)
    assert found["dspark_committed_tokens_total"] / found["dspark_rounds_total"] == 3.0
    assert [found[f"dspark_offered_tokens_total/{k}"] for k in range(1, 5)] == [3, 3, 3, 3]
    assert [found[f"dspark_planned_tokens_total/{k}"] for k in range(1, 5)] == [2, 2, 1, 1]
    assert [found[f"dspark_accepted_tokens_total/{k}"] for k in range(1, 5)] == [2, 2, 1, 1]
    assert found["dspark_budget_tokens_sum"] == 6
    assert found["dspark_prompt_tokens_total"] == 7


def test_predictions_are_compared_once(meter: Meter) -> None:
    found = values_of(meter)
    assert found["dspark_predicted_steps_total"] == 2
    assert found["dspark_predicted_step_seconds_total"] == pytest.approx(0.04)
    assert found["dspark_real_step_seconds_total"] == pytest.approx(0.06)
    assert found["dspark_step_seconds_absolute_error_total"] == pytest.approx(0.02)
    assert found["dspark_predicted_accepted_tokens_total"] == pytest.approx(1.5)
    assert found["dspark_predicted_steps_accepted_tokens_total"] == 1
    assert found["dspark_planned_steps_total/drafted"] == 1
    assert found["dspark_planned_steps_total/plain"] == 1


def test_what_is_true_now(meter: Meter) -> None:
    found = values_of(meter)
    assert found["dspark_waiting_requests"] == 3
    assert found["dspark_free_pages"] == 5
    assert found["dspark_cached_prompt_tokens_total"] == 40
    assert found["dspark_preemptions_total"] == 1
    assert found["dspark_broken_drafts_total"] == 1  # UC-157, UC-066
    assert found["dspark_policy_info/auto"] == 1
    assert found["dspark_http_responses_total//v1/completions/200"] == 1


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        histogram.add(value, times)
    assert histogram.buckets() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(13.0)
    assert histogram.count == 5


def test_the_dashboard_asks_for_metrics_that_exist(meter: Meter) -> None:
    names = {key.split("/")[0] for key in values_of(meter)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"dspark_\w+", target["expr"])
    }
    assert asked <= names
    assert len(panels) >= 12
