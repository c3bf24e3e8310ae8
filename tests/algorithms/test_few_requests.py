"""Plain arithmetic for few requests against the arrays for many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.few_requests import admit_few, causal_few, foresee_few, free_few
from dspark.algorithms.foresight import foresee
from dspark.algorithms.prefix_scheduler import Choice, Limits, Prices, admit, causal, free


def drawn(num_requests: int, seed: int) -> tuple[np.random.Generator, np.ndarray, Prices]:
    rng = np.random.default_rng(seed)
    # few different values, so that ties and dead ends are frequent
    chances_RK = rng.integers(0, 5, (num_requests, 3)) / 4
    prices = Prices(
        seconds_B=1.0 + rng.random(rng.integers(1, num_requests * 3 + 2)).cumsum() / 2,
        num_certain=num_requests,
        plain_seconds=None,
    )
    return rng, chances_RK.cumprod(1).astype(np.float32), prices


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_searches_find_the_same_lengths(num_requests: int, seed: int) -> None:
    rng, survival_RK, prices = drawn(num_requests, seed)
    caps_R = rng.integers(0, 4, num_requests)
    limits = Limits(caps_R=caps_R)
    rows, caps, seconds = survival_RK.tolist(), caps_R.tolist(), prices.seconds_B.tolist()
    assert (
        free_few(rows, seconds, caps, num_requests) == free(survival_RK, prices, limits)[1].tolist()
    )
    assert (
        causal_few(rows, seconds, caps, num_requests)
        == causal(survival_RK, prices, limits)[1].tolist()
    )
    for budget in range(num_requests * 3 + 1):
        choice = Choice(budget=budget, least_R=None, rate=0.0, plain_rate=None, rates_B=np.zeros(1))
        assert admit_few(rows, budget, caps) == admit(survival_RK, choice, caps_R).tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_foresight_is_the_same(num_requests: int, num_scenarios: int, seed: int) -> None:
    rng, _, prices = drawn(num_requests, seed)
    survival_SRK = rng.random((num_scenarios, num_requests, 3)).cumprod(2).astype(np.float32)
    caps_R = rng.integers(0, 4, num_requests)
    found = foresee_few(
        survival_SRK.tolist(), prices.seconds_B.tolist(), caps_R.tolist(), num_requests
    )
    expected = foresee(survival_SRK, prices, caps_R)
    assert found.budget == expected.budget
    assert found.rate == pytest.approx(expected.rate, rel=1e-5)
    assert found.fixed_rate == pytest.approx(expected.fixed_rate, rel=1e-5)
    np.testing.assert_allclose(found.rates_B, expected.rates_B, rtol=1e-5)
