"""For whom drafting pays, against trying every group and every cut by hand."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.foresight import Worth, foresee
from dspark.algorithms.prefix_scheduler import free_gain, priced


def best_by_hand(blocks_RHK: np.ndarray, worth: Worth, caps: list[int]) -> float:
    """The largest gain of any group whose blocks are each cut where it is best."""

    def gain(block_K: np.ndarray, cap: int) -> float:
        return max(block_K[:length].sum() - worth.price * length for length in range(cap + 1))

    able = [r for r, cap in enumerate(caps) if cap]
    return max(
        sum(np.mean([gain(block_K, caps[r]) for block_K in blocks_RHK[r]]) for r in group)
        - worth.second * worth.draft_seconds_N[len(group)]
        for size in range(len(able) + 1)
        for group in combinations(able, size)
    )


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_group_and_every_cut_are_the_best(
    num_requests: int, num_blocks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    blocks_RHK = rng.random((num_requests, num_blocks, 3)).cumprod(2).astype(np.float32)
    caps_R = rng.integers(0, 4, num_requests)
    worth = Worth(
        second=2.0,
        token_seconds=rng.uniform(0.0, 0.4),
        draft_seconds_N=[0.0, *(rng.uniform(0.0, 0.3) + 0.1 * np.arange(num_requests))],
    )
    found = foresee(blocks_RHK, worth, caps_R)
    assert all(caps_R[r] for r in found.drafting)
    net = found.accepted - worth.price * found.verified
    net -= worth.second * worth.draft_seconds_N[len(found.drafting)]
    expected = best_by_hand(blocks_RHK, worth, caps_R.tolist())
    assert net == pytest.approx(expected, abs=1e-5)


def test_at_the_best_rate_in_the_long_run_the_largest_gain_is_nothing() -> None:
    """Steps of two kinds, a confident block or a doubtful one: cuts by gain reach a rate that no
    other pair of cuts exceeds, and more than cuts by the rate of each step."""
    blocks_SK = np.array([[0.95, 0.9, 0.85, 0.8], [0.3, 0.2, 0.1, 0.05]], dtype=np.float32)
    seconds_B = np.array([1.0, 1.15, 1.3, 1.45, 1.6])
    tokens_SB = 1.0 + np.pad(np.cumsum(blocks_SK, 1), ((0, 0), (1, 0)))

    def rate(cuts: tuple[int, ...]) -> float:
        tokens = sum(tokens_SB[s, cut] for s, cut in enumerate(cuts))
        return tokens / sum(seconds_B[cut] for cut in cuts)

    best = max(rate(cuts) for cuts in product(range(5), repeat=2))
    worth = 0.0
    for _ in range(5):
        cuts = tuple((tokens_SB - worth * seconds_B).argmax(1).tolist())
        worth = rate(cuts)
    assert worth == pytest.approx(best)
    alone = tuple((tokens_SB / seconds_B).argmax(1).tolist())
    assert rate(alone) < 0.99 * best


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_price_is_the_free_search_where_every_token_costs_the_same(
    num_requests: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    survival_RK = rng.random((num_requests, 3)).cumprod(1).astype(np.float32)
    caps_R = rng.integers(0, 4, num_requests)
    seconds_B = 1.0 + 0.125 * np.arange(3 * num_requests + 1)
    lengths_R = free_gain(survival_RK, caps_R, seconds_B=seconds_B, worth=3.0)
    assert priced(survival_RK, caps_R, price=3.0 * 0.125).tolist() == lengths_R.tolist()
