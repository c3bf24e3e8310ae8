"""Plain arithmetic for few requests against the arrays for many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.few_requests import (
    admit_few,
    causal_few,
    foresee_alone,
    foresee_few,
    free_few,
    priced_few,
    stepped,
)
from dspark.algorithms.foresight import Worth, foresee
from dspark.algorithms.prefix_scheduler import (
    Choice,
    Limits,
    Prices,
    admit,
    causal,
    free_gain,
    priced,
)


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
    for worth in (0.5, 1.0, 3.0):
        expected_R = free_gain(survival_RK, caps_R, seconds_B=prices.seconds_B, worth=worth)
        assert free_few(rows, seconds, caps, worth=worth) == expected_R.tolist()
    for price in (0.0, 0.25, 0.3):
        assert priced_few(rows, caps, price=price) == (
            priced(survival_RK, caps_R, price=price).tolist()
        )
        for most in range(num_requests * 3 + 1):
            expected = priced(survival_RK, caps_R, price=price, most=most).tolist()
            assert priced_few(rows, caps, price=price, most=most) == expected
            assert sum(expected) <= most
    assert (
        causal_few(rows, seconds, caps, num_requests)
        == causal(survival_RK, prices, limits)[1].tolist()
    )
    for budget in range(num_requests * 3 + 1):
        choice = Choice(budget=budget, least_R=None, rate=0.0, plain_rate=None, rates_B=np.zeros(1))
        assert admit_few(rows, budget, caps) == admit(survival_RK, choice, caps_R).tolist()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_foresight_is_the_same(num_requests: int, num_blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks_RHK = rng.random((num_requests, num_blocks, 3)).cumprod(2).astype(np.float32)
    caps_R = rng.integers(0, 4, num_requests)
    head_start_R = rng.uniform(-0.2, 0.0, num_requests)
    worth = Worth(
        second=2.0,
        token_seconds=rng.uniform(0.0, 0.3),
        draft_seconds_N=[0.0, *(0.1 + 0.1 * np.arange(num_requests))],
    )
    found = foresee_few(blocks_RHK.tolist(), worth, caps_R.tolist(), head_start=head_start_R)
    expected = foresee(blocks_RHK, worth, caps_R, head_start_R=head_start_R)
    assert found.drafting == expected.drafting
    assert found.verified == pytest.approx(expected.verified)
    assert found.accepted == pytest.approx(expected.accepted, rel=1e-5)
    np.testing.assert_allclose(found.gains_R, expected.gains_R, atol=1e-6)


@given(st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_a_later_survival_changes_no_earlier_admission(cap: int, seed: int) -> None:
    """Section 5.2: a lone request's prices differ by position and are known before its block."""
    rng = np.random.default_rng(seed)
    seconds = [1.0, *(1.0 + rng.integers(0, 3, 5).cumsum() / 10).tolist()]
    row = (rng.integers(0, 5, 5) / 4).cumprod().tolist()
    length = stepped(row, seconds, cap, worth=2.0)
    assert 0 <= length <= cap
    prices = [2.0 * (seconds[k + 1] - seconds[k]) for k in range(5)]
    assert all(row[k] > prices[k] for k in range(length))
    assert length == cap or row[length] <= prices[length]
    for k in range(length, 5):
        other = [*row[:k], *(row[k:] if k == length else rng.random(5 - k).tolist())]
        assert stepped(other, seconds, cap, worth=2.0) >= min(length, k)
    assert stepped(row, seconds[: length + 1], cap, worth=2.0) == length


def test_a_lone_request_is_foreseen_at_what_its_lengths_cost() -> None:
    """Two tokens for nothing and a third for much: a mean price would take all or none."""
    rows = [[0.4, 0.2, 0.1], [0.9, 0.8, 0.7]]
    seconds = [1.0, 1.0, 1.0, 1.3]
    found, mean = foresee_alone(rows, seconds, 3, worth=1.2)
    assert found.drafting == [0]
    assert found.verified == 2.5
    assert found.accepted == pytest.approx((0.6 + 2.4) / 2)
    assert mean == pytest.approx(1.15)
    assert found.gains_R == pytest.approx([1.5 - 1.2 * 0.15])
    assert foresee_alone(rows, [1.0, 3.0], 3, worth=1.2)[0].drafting == []
