"""Terms of a block to come: what would have gained most on the blocks before it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.prefix_scheduler import priced
from dspark.algorithms.terms import PRICES, best, gains


def blocks_of(seed: int, *, num_requests: int = 2, num_blocks: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((num_requests, num_blocks, 3)).cumprod(2).astype(np.float32)


@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_gains_are_those_of_verifying_by_these_terms(num_requests: int, seed: int) -> None:
    blocks_RHK = blocks_of(seed, num_requests=num_requests)
    rng = np.random.default_rng(seed)
    verify_B = 1.0 + rng.random(3 * num_requests + 1).cumsum()
    gain_PB = gains(blocks_RHK, second=0.3, verify_B=verify_B)
    caps_R = np.full(num_requests, 3)
    for price, gain_B in zip(PRICES, gain_PB, strict=True):
        for most, gain in enumerate(gain_B):
            total = 0.0
            for survival_RK in blocks_RHK.transpose(1, 0, 2):
                lengths_R = priced(survival_RK, caps_R, price=price, most=most)
                total += sum(row[:n].sum() for row, n in zip(survival_RK, lengths_R, strict=True))
                total -= 0.3 * (verify_B[lengths_R.sum()] - verify_B[0])
            assert gain == pytest.approx(total / blocks_RHK.shape[1], abs=1e-6)
    found = best(gain_PB)
    assert gain_PB[PRICES.index(found.price), found.most] == gain_PB.max()


def test_a_shelf_is_filled_and_not_left() -> None:
    verify_B = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0])
    found = best(gains(blocks_of(0, num_blocks=40), second=1.0, verify_B=verify_B))
    assert found.most == 4
    assert found.price <= 0.01


def test_where_every_token_costs_the_same_the_price_is_that_cost() -> None:
    verify_B = 1.0 + 0.3 * np.arange(7)
    found = best(gains(blocks_of(0, num_blocks=400), second=1.0, verify_B=verify_B))
    assert found.price == 0.3
    assert found.most == 6
