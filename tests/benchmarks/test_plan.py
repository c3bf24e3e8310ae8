"""`bench plan` on a toy target: keys and consistency; the figures are a machine's own."""

import pytest

from dspark.benchmarks.plan import PlanConfig, measure, plan_times
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


def test_every_repeat_is_timed():
    assert len(plan_times(PlanConfig(repeats=7), num_requests=2)) == 7


@pytest.mark.parametrize("name", ["requests", "block_size", "repeats", "context"])
def test_sizes_below_one_are_refused(name: str):
    with pytest.raises(InputError, match=name):
        PlanConfig(**{name: 0})
