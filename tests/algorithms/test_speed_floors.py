"""Floors on the speed of a request: kept whenever any plan can keep them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.prefix_scheduler import Limits, Prices, admit, causal, choose_budget
from dspark.algorithms.ranking import rank
from dspark.algorithms.speed_floors import keeps_floors, least_lengths
from tests.algorithms.lazy_plan import all_lengths


@st.composite
def cases(draw):
    """Survivals [R, K], caps, floors (0: none), growing seconds, seconds of a plain step."""
    num_requests, block_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    confidence = st.floats(0.0625, 1.0, width=16)
    rows = draw(
        st.lists(
            st.lists(confidence, min_size=block_size, max_size=block_size),
            min_size=num_requests,
            max_size=num_requests,
        )
    )
    caps = draw(st.lists(st.integers(0, block_size), min_size=num_requests, max_size=num_requests))
    floor = st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.2, 2.0])
    floors = draw(st.lists(floor, min_size=num_requests, max_size=num_requests))
    most = num_requests * block_size
    steps = draw(st.lists(st.floats(0.0, 0.5), min_size=most, max_size=most))
    seconds = draw(st.floats(0.5, 2.0)) + np.concatenate([[0.0], np.cumsum(steps)])
    survival_RK = np.cumprod(np.array(rows, dtype=np.float32), axis=1)
    plain_seconds = draw(st.floats(0.3, 1.0)) * float(seconds[0])
    return survival_RK, np.array(caps), np.array(floors), seconds, plain_seconds


def is_kept(lengths, survival_RK, floors, seconds: float) -> bool:
    tokens_R = [1.0 + row[:n].sum() for row, n in zip(survival_RK, lengths, strict=True)]
    return all(tokens >= f * seconds - 1e-6 for tokens, f in zip(tokens_R, floors, strict=True))


@given(cases())
def test_floors_are_kept_whenever_a_plan_exists_that_keeps_them(case):
    survival_RK, caps_R, floors_R, seconds, plain_seconds = case
    prices = Prices(seconds_B=seconds, num_certain=len(caps_R), plain_seconds=plain_seconds)
    choice = choose_budget(survival_RK, prices, Limits(caps_R=caps_R, floors_R=floors_R))
    lengths = admit(survival_RK, choice, caps_R)

    def seconds_of(tried) -> float:
        return seconds[sum(tried)] if sum(tried) else plain_seconds

    kept_R = floors_R.copy()
    kept_R[list(choice.unmet)] = 0.0
    assert is_kept(lengths, survival_RK, kept_R, seconds_of(lengths))
    if choice.unmet:
        # with a hair less asked for, rounding cannot make the difference
        harder_R = floors_R * (1 + 1e-5)
        assert not any(
            is_kept(tried, survival_RK, harder_R, seconds_of(tried) + 1e-4)
            for tried in all_lengths(caps_R)
        )


@given(cases())
def test_budgets_that_keep_floors_are_those_that_counting_finds(case):
    survival_RK, caps_R, floors_R, seconds, _ = case
    ranking = rank(survival_RK, caps_R)
    found_B = keeps_floors(ranking, survival_RK, floors_R, seconds)
    for budget, is_found in enumerate(found_B):
        lengths = ranking.lengths(budget)
        for slack in (1.0 - 1e-6, 1.0 + 1e-6):
            expected = all(
                1.0 + float(row[:n].astype(np.float64).sum()) >= f * seconds[budget] * slack
                for row, n, f in zip(survival_RK, lengths, floors_R, strict=True)
            )
            if expected == is_found:
                break
        assert expected == is_found


def test_a_floor_buys_a_request_the_drafts_that_it_needs_and_no_more():
    """At high load nothing would be drafted; the request with a floor gets two tokens."""
    survival_RK = np.tile(np.array([[0.6, 0.4, 0.3]], dtype=np.float32), (8, 1))
    seconds = 1.0 + 0.1 * np.arange(25)
    prices = Prices(seconds_B=seconds, num_certain=8, plain_seconds=1.0)
    caps_R = np.full(8, 3)
    floors_R = np.zeros(8)
    assert choose_budget(survival_RK, prices, Limits(caps_R=caps_R)).budget == 0
    floors_R[5] = 1.6
    choice = choose_budget(survival_RK, prices, Limits(caps_R=caps_R, floors_R=floors_R))
    assert admit(survival_RK, choice, caps_R).tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    assert choice.unmet == ()


def test_a_floor_keeps_the_drafts_of_others_from_slowing_a_request_down():
    """The best total makes steps of 1.8 s; a request that cannot draft asks for one in 1.3 s."""
    survival_RK = np.full((2, 8), 0.9, dtype=np.float32)
    prices = Prices(seconds_B=1.0 + 0.1 * np.arange(17), num_certain=2, plain_seconds=1.0)
    caps_R = np.array([8, 0])
    unbounded = choose_budget(survival_RK, prices, Limits(caps_R=caps_R))
    assert unbounded.budget == 8
    floors_R = np.array([0.0, 1 / 1.3])
    bounded = choose_budget(survival_RK, prices, Limits(caps_R=caps_R, floors_R=floors_R))
    assert bounded.budget == 3


def test_a_floor_out_of_reach_is_named_and_leaves_the_others_alone():
    survival_RK = np.full((2, 2), 0.9, dtype=np.float32)
    prices = Prices(seconds_B=1.0 + 0.1 * np.arange(5), num_certain=2, plain_seconds=1.0)
    limits = Limits(caps_R=np.full(2, 2), floors_R=np.array([50.0, 1.7]))
    choice = choose_budget(survival_RK, prices, limits)
    assert choice.unmet == (0,)
    assert choice.least_R is not None
    assert choice.least_R.tolist() == [0, 1]


def test_floors_that_need_more_tokens_than_a_step_may_hold_lose_the_greediest_first():
    survival_RK = np.full((2, 4), 0.9, dtype=np.float32)
    least_R, kept_R = least_lengths(
        survival_RK,
        np.array([2.0, 1.2]),
        np.full(2, 4),
        seconds_B=np.full(3, 1.5),
        plain_seconds=None,
    )
    assert kept_R.tolist() == [0.0, 1.2]
    assert least_R.tolist() == [0, 1]


def test_the_causal_walk_starts_behind_what_floors_need_and_stops_before_breaking_one():
    survival_RK = np.array([[0.9, 0.8, 0.7], [0.2, 0.1, 0.05]], dtype=np.float32)
    seconds = 1.0 + 0.1 * np.arange(7)
    prices = Prices(seconds_B=seconds, num_certain=2, plain_seconds=None)
    caps_R = np.full(2, 3)
    _, without = causal(survival_RK, prices, Limits(caps_R=caps_R))
    assert without.tolist() == [3, 0]
    limits = Limits(caps_R=caps_R, floors_R=np.array([0.0, 0.9]))
    _, lengths = causal(survival_RK, prices, limits, least_R=np.array([0, 1]))
    assert lengths.tolist() == [2, 1]
    tokens = 1.2
    assert tokens / seconds[3] == pytest.approx(0.923, abs=1e-3)
    assert tokens / seconds[4] < 0.9
