"""`bench plan` on a toy target: keys and consistency; the figures are a machine's own."""

import pytest

from dspark.benchmarks import plan
from dspark.benchmarks.plan import PlanConfig, measure, plan_times
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.probes import LOOK
from dspark.errors import InputError
from tests.toys import toy_target


def test_the_json_has_the_agreed_keys():
    config = PlanConfig(requests=3, block_size=4, repeats=5, context=8)
    report = measure(toy_target(), config=config)
    data = report.to_json()
    assert {"requests", "block_size", "median_us", "share_of_step"} <= data.keys()
    assert (data["requests"], data["block_size"]) == (3, 4)
    assert data["share_of_step"] == pytest.approx(data["median_us"] / 1e3 / data["step_ms"])
    assert data["one_request_share"] > 0
    assert data["median_us"] == data["many"]["median_us"]


@pytest.mark.parametrize("num_requests", [1, 2, 20])
def test_the_engines_own_planner_is_timed_while_everybody_drafts(num_requests: int, monkeypatch):
    planners = []

    class Watched(AdaptivePlanner):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            planners.append(self)

    monkeypatch.setattr(plan, "AdaptivePlanner", Watched)
    times = plan_times(PlanConfig(repeats=70), num_requests=num_requests)
    assert 0 < times.plan_us <= times.median_us <= times.p99_us
    (planner,) = planners
    assert len(planner.records) == 70
    drafting = [record.num_drafting for record in planner.records]
    assert drafting.count(num_requests) >= 70 - LOOK  # plain steps are looked at
    assert set(drafting) <= {0, num_requests}


@pytest.mark.parametrize("name", ["requests", "block_size", "repeats", "context"])
def test_sizes_below_one_are_refused(name: str):
    with pytest.raises(InputError, match=name):
        PlanConfig(**{name: 0})
