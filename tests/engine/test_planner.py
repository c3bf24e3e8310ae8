"""Planners without a cycle: baselines by name."""

import numpy as np
import pytest

from dspark.algorithms.policies import FixedWidth, parse_policy
from dspark.engine.planner import FixedPlanner, Outcome, Outlook


def outlook(max_widths: list[int]) -> Outlook:
    count = len(max_widths)
    return Outlook(
        slots=range(count),
        rounds=[1] * count,
        max_widths=max_widths,
        num_prompt_tokens=0,
        num_certain=count,
        context=100 * count,
    )


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("none", [0, 0, 0]),
        ("fixed", [5, 5, 2]),
        ("fixed:3", [3, 3, 2]),
        ("mtp1", [1, 1, 1]),
        ("table:2=5,4=2", [2, 2, 2]),
        ("table:2=5", [0, 0, 0]),
        ("threshold:0.5", [5, 1, 0]),
        ("threshold:0.5:3", [3, 1, 0]),
    ],
)
def test_baselines_by_name(name: str, lengths: list[int]) -> None:
    policy = parse_policy(name)
    planner = FixedPlanner(policy)
    caps = planner.caps(outlook([5, 5, 2]))
    logits_RK = np.array([[2.0] * 5, [2.0, -2.0, 2.0, 2.0, 2.0], [-0.1] * 5], dtype=np.float32)
    found = list(planner.plan(logits_RK, caps).lengths) if any(caps) else caps
    assert found == lengths
    planner.observe(
        Outcome(
            verified=found,
            accepted=[0] * 3,
            num_prompt_tokens=0,
            draft_seconds=1.0,
            verify_seconds=2.0,
        )
    )
    (record,) = planner.records
    assert record.budget == sum(lengths)
    assert record.seconds == 3.0


def test_no_width_is_the_whole_block() -> None:
    assert FixedPlanner.of_width(None).caps(outlook([7, 4])) == [7, 4]
    assert FixedPlanner(FixedWidth(width=2)).caps(outlook([7, 1])) == [2, 1]
