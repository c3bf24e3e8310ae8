"""What drafting is expected to yield, against trying every budget of every scenario by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.foresight import foresee
from dspark.algorithms.prefix_scheduler import Limits, Prices, free


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_each_scenario_gets_its_best_budget(
    num_scenarios: int, num_requests: int, seed: int
) -> None:
    """The same numbers as the free search over each scenario on its own."""
    rng = np.random.default_rng(seed)
    survival_SRK = rng.random((num_scenarios, num_requests, 3)).cumprod(2).astype(np.float32)
    caps_R = rng.integers(0, 4, num_requests)
    prices = Prices(
        seconds_B=1.0 + rng.random(num_requests * 3 + 1).cumsum(),
        num_certain=num_requests,
        plain_seconds=1.0,
    )
    found = foresee(survival_SRK, prices, caps_R)
    tokens = seconds = 0.0
    for survival_RK in survival_SRK:
        choice, _ = free(survival_RK, prices.without_plain, Limits(caps_R=caps_R))
        tokens += choice.rate * prices.seconds_B[choice.budget]
        seconds += prices.seconds_B[choice.budget]
    assert found.rate == pytest.approx(tokens / seconds, rel=1e-4)
    assert found.fixed_rate == pytest.approx(found.rates_B.max())
    assert found.rates_B[0] == pytest.approx(num_requests / prices.seconds_B[0])


def test_a_mixture_of_good_and_bad_blocks_is_worth_more_than_its_mean() -> None:
    survival_SRK = np.array([[[0.95, 0.9, 0.85]], [[0.05, 0.0, 0.0]]], dtype=np.float32)
    prices = Prices(seconds_B=np.array([1.0, 1.3, 1.6, 1.9]), num_certain=1, plain_seconds=0.9)
    found = foresee(survival_SRK, prices, np.array([3]))
    assert found.rate > 1.05 * found.fixed_rate
