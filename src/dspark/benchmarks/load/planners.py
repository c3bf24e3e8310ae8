"""The planner that a policy's name stands for, with nothing learnt yet. It measures no costs."""

from collections.abc import Callable

from dspark.algorithms.calibration import Calibration
from dspark.algorithms.policies import Adaptive, parse_policy
from dspark.algorithms.step_cost import StepCost
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.planner import FixedPlanner, Planner


def planner_of(
    policy: str,
    *,
    block_size: int,
    cost: Callable[[], StepCost],
    calibration: Calibration | None,
) -> Planner:
    """`cost` is asked only where the policy weighs costs. Raises `InputError` for other names."""
    parsed = parse_policy(policy)
    if isinstance(parsed, Adaptive):
        return AdaptivePlanner(parsed, block_size=block_size, cost=cost(), calibration=calibration)
    return FixedPlanner(parsed)
