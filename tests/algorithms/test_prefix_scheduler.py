"""The prefix scheduler against references that cannot look ahead, and against trying everything."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.acceptance import accept_probability, residual
from dspark.algorithms.prefix_scheduler import (
    Limits,
    Prices,
    admit,
    causal,
    choose_budget,
    free,
    free_gain,
    priced,
)
from dspark.algorithms.ranking import rank
from dspark.core import Coupling, SamplingParams
from tests.algorithms.lazy_plan import LazyBlock, all_lengths, lazy_admit, lazy_causal, rate_of
from tests.algorithms.toy_decoding import ToyRequest, decode
from tests.algorithms.toy_distributions import toy_logits
from tests.algorithms.toy_enumeration import exact_output

# Values with exact ties, zeros and ones, besides arbitrary ones.
CONFIDENCES = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0]), st.floats(0.0, 1.0, width=32)
)
SECONDS = st.one_of(st.sampled_from([1.0, 1.0, 2.0, 0.5]), st.floats(0.1, 10.0))


@st.composite
def cases(draw, *, max_requests: int = 4, max_block: int = 4):
    """Confidences [R, K], caps, and seconds for any budget: no shape of the cost is assumed."""
    num_requests = draw(st.integers(1, max_requests))
    block_size = draw(st.integers(1, max_block))
    row = st.lists(CONFIDENCES, min_size=block_size, max_size=block_size)
    rows = draw(st.lists(row, min_size=num_requests, max_size=num_requests))
    caps = draw(st.lists(st.integers(0, block_size), min_size=num_requests, max_size=num_requests))
    most = num_requests * block_size
    seconds = draw(st.lists(SECONDS, min_size=1, max_size=most + 1))
    return np.array(rows, dtype=np.float32), np.array(caps), np.array(seconds)


def survival_of(confidence_RK: np.ndarray) -> np.ndarray:
    return np.cumprod(confidence_RK, axis=1, dtype=np.float32)


def prices_of(seconds, *, num_certain: int, plain_seconds: float | None = None) -> Prices:
    return Prices(
        seconds_B=np.asarray(seconds, dtype=np.float64),
        num_certain=num_certain,
        plain_seconds=plain_seconds,
    )


def lazy(confidence_RK, caps) -> LazyBlock:
    return LazyBlock(confidence=lambda r, k: confidence_RK[r, k], caps=list(caps))


@given(cases())
def test_causal_equals_algorithm_1_on_a_block_that_reveals_nothing_ahead(case):
    """UC-016: the reference asks for a confidence only after admitting the token before it."""
    c_RK, caps_R, seconds = case
    block = lazy(c_RK, caps_R)
    expected = lazy_causal(block, seconds, len(c_RK))
    _, lengths = causal(
        survival_of(c_RK), prices_of(seconds, num_certain=len(c_RK)), Limits(caps_R=caps_R)
    )
    assert lengths.tolist() == expected
    for r, length in enumerate(expected):
        asked = [slot for request, slot in block.asked if request == r]
        assert asked == list(range(len(asked)))
        assert len(asked) <= length + 1


@given(cases(), st.integers(0, 20), st.data())
def test_admit_equals_a_block_that_reveals_nothing_ahead(case, budget: int, data):
    c_RK, caps_R, seconds = case
    least = data.draw(
        st.none() | st.lists(st.integers(0, 2), min_size=len(c_RK), max_size=len(c_RK))
    )
    choice = choose_budget(
        survival_of(c_RK), prices_of(seconds, num_certain=len(c_RK)), Limits(caps_R=caps_R)
    )
    choice = type(choice)(
        budget=budget,
        least_R=None if least is None else np.array(least),
        rate=choice.rate,
        plain_rate=None,
        rates_B=choice.rates_B,
    )
    lengths = admit(survival_of(c_RK), choice, caps_R)
    assert lengths.tolist() == lazy_admit(lazy(c_RK, caps_R), budget, least)


@given(cases(), st.data())
def test_changing_later_tokens_never_changes_an_earlier_admission(case, data):
    """UC-016: x_k shows in the confidences behind k alone; those may become anything."""
    c_RK, caps_R, seconds = case
    num_requests, block_size = c_RK.shape
    request = data.draw(st.integers(0, num_requests - 1))
    slot = data.draw(st.integers(0, block_size - 1))
    changed_RK = c_RK.copy()
    for later in range(slot + 1, block_size):
        changed_RK[request, later] = data.draw(CONFIDENCES)
    prices, limits = prices_of(seconds, num_certain=num_requests), Limits(caps_R=caps_R)
    history_RK = survival_of(np.full_like(c_RK, data.draw(st.floats(0.0, 1.0, width=32))))
    choice = choose_budget(history_RK, prices, limits)
    for plan in (
        lambda s_RK: causal(s_RK, prices, limits)[1],
        lambda s_RK: admit(s_RK, choice, caps_R),
        lambda s_RK: priced(s_RK, caps_R, price=0.3, most=choice.budget),
    ):
        before, after = plan(survival_of(c_RK)), plan(survival_of(changed_RK))
        assert (before[request] > slot) == (after[request] > slot)


@given(cases(max_requests=3, max_block=3), SECONDS)
def test_the_global_search_finds_the_best_of_all_lengths(case, plain_seconds: float):
    """Any cost, staircase or not: sorting loses nothing; plain decoding competes."""
    c_RK, caps_R, seconds = case
    s_RK = survival_of(c_RK)
    caps_R = np.minimum(caps_R, (s_RK > 0).sum(1))  # what cannot survive is no candidate
    prices = prices_of(seconds, num_certain=len(c_RK), plain_seconds=plain_seconds)
    choice = choose_budget(s_RK, prices, Limits(caps_R=caps_R))
    rates = [
        rate_of(lengths, s_RK, seconds)
        for lengths in all_lengths(caps_R)
        if 0 < sum(lengths) < len(seconds)
    ]
    best = max([*rates, len(c_RK) / plain_seconds])
    assert choice.rate == pytest.approx(best)
    assert choice.plain_rate == pytest.approx(len(c_RK) / plain_seconds)
    if choice.budget > 0:
        lengths = admit(s_RK, choice, caps_R)
        assert rate_of(lengths, s_RK, seconds) == pytest.approx(best)


@given(cases(max_requests=3, max_block=3), st.floats(0.1, 5.0), st.lists(st.floats(0.0, 2.0)))
def test_causal_is_optimal_where_the_cost_bends_upwards_only(case, first: float, bends):
    """The paper: early stopping finds the maximum iff Theta is unimodal; a convex cost makes it."""
    c_RK, caps_R, _ = case
    s_RK = survival_of(c_RK)
    slopes = np.cumsum([*bends, *[0.0] * (s_RK.size + 1)][: s_RK.size])
    seconds = first + np.concatenate([[0.0], np.cumsum(slopes)])
    prices = prices_of(seconds, num_certain=len(c_RK))
    choice, lengths = causal(s_RK, prices, Limits(caps_R=caps_R))
    best = max(rate_of(tried, s_RK, seconds) for tried in all_lengths(caps_R))
    assert choice.rate == pytest.approx(best)
    assert rate_of(lengths, s_RK, seconds) == pytest.approx(best)


def test_early_stopping_parks_on_a_shelf_and_the_delayed_search_does_not():
    """UC-137: a pass costs what its tokens rounded up to 8 cost; 4 requests stand at 4 of 8."""
    c_RK = np.full((4, 7), 0.95, dtype=np.float32)
    tokens = 4 + np.arange(29)
    seconds = 1.0 + 0.25 * -(-tokens // 8)
    prices = prices_of(seconds, num_certain=4, plain_seconds=1.2)
    limits = Limits(caps_R=np.full(4, 7))
    parked, _ = causal(survival_of(c_RK), prices, limits)
    assert parked.budget == 4  # the end of the first shelf
    delayed = choose_budget(survival_of(c_RK), prices, limits)
    assert delayed.budget == 28
    assert delayed.rate > 1.5 * parked.rate
    lengths = admit(survival_of(c_RK), delayed, limits.caps_R)
    assert lengths.tolist() == [7, 7, 7, 7]


def test_ties_go_by_position_then_request():
    s_RK = np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.25]], dtype=np.float32)
    choice = choose_budget(
        s_RK,
        prices_of([1.0, *[9.0] * 2, 1.0, *[9.0] * 3], num_certain=3),
        Limits(caps_R=np.full(3, 2)),
    )
    assert choice.budget == 3
    assert admit(s_RK, choice, np.full(3, 2)).tolist() == [1, 1, 1]
    four = type(choice)(budget=4, least_R=None, rate=0.0, plain_rate=None, rates_B=np.zeros(1))
    assert admit(s_RK, four, np.full(3, 2)).tolist() == [2, 1, 1]


def test_drafting_is_left_out_where_the_drafter_costs_more_than_it_brings():
    """UC-139, UC-143: the same survivals, a drafter ten times as slow."""
    s_RK = survival_of(np.full((2, 5), 0.8, dtype=np.float32))
    verify = 10.0 + 0.2 * np.arange(11)
    limits = Limits(caps_R=np.full(2, 5))
    quick = choose_budget(s_RK, prices_of(3.0 + verify, num_certain=2, plain_seconds=10.0), limits)
    slow = choose_budget(s_RK, prices_of(30.0 + verify, num_certain=2, plain_seconds=10.0), limits)
    assert quick.budget == 10
    assert slow.budget == 0
    assert slow.rate == slow.plain_rate == 0.2


def test_a_small_gain_does_not_move_the_budget():
    """Hysteresis: 3 tokens promise 1 % more than 2; noise of that size must not cost a change."""
    s_RK = np.array([[0.9, 0.8, 0.7]], dtype=np.float32)
    rates = [0.5, 0.9, 1.0, 1.01]
    seconds = [t / rate for t, rate in zip([1.0, 1.9, 2.7, 3.4], rates, strict=True)]
    prices, limits = (
        prices_of(seconds, num_certain=1, plain_seconds=2.0),
        Limits(caps_R=np.array([3])),
    )
    assert choose_budget(s_RK, prices, limits).budget == 3
    assert choose_budget(s_RK, prices, limits, incumbent=2, margin=0.02).budget == 2
    assert choose_budget(s_RK, prices, limits, incumbent=2, margin=0.005).budget == 3
    assert choose_budget(s_RK, prices, limits, incumbent=0, margin=0.02).budget == 3
    assert choose_budget(s_RK, prices, limits, incumbent=9, margin=0.02).budget == 3


def test_caps_hold_and_a_cap_of_zero_means_no_speculation():
    s_RK = np.full((3, 4), 0.99, dtype=np.float32)
    prices, limits = prices_of(np.ones(13), num_certain=3), Limits(caps_R=np.array([0, 2, 4]))
    assert causal(s_RK, prices, limits)[1].tolist() == [0, 2, 4]
    assert free(s_RK, prices, limits)[1].tolist() == [0, 2, 4]


def test_the_length_of_the_prices_bounds_the_budget():
    s_RK = np.full((3, 4), 0.99, dtype=np.float32)
    prices, limits = prices_of(np.ones(6), num_certain=3), Limits(caps_R=np.full(3, 4))
    assert causal(s_RK, prices, limits)[0].budget == 5
    assert choose_budget(s_RK, prices, limits).budget == 5


def test_a_survival_that_is_not_a_number_is_never_verified():
    c_RK = np.array([[0.9, np.nan, 0.9], [0.8, 0.8, 0.8]], dtype=np.float32)
    prices, limits = prices_of(np.ones(7), num_certain=2), Limits(caps_R=np.full(2, 3))
    assert causal(survival_of(c_RK), prices, limits)[1].tolist() == [1, 3]


def test_no_request_and_no_position_is_an_empty_plan():
    for shape in ((0, 3), (2, 0)):
        s_RK = np.zeros(shape, dtype=np.float32)
        limits = Limits(caps_R=np.zeros(shape[0], dtype=np.int64))
        _, lengths = causal(s_RK, prices_of([1.0], num_certain=shape[0]), limits)
        assert lengths.tolist() == [0] * shape[0]


# A dip, then a gain: the shape on which a search over the whole block wants to look ahead.
DIP = [1.0, 1.4, 1.45, 2.35, 2.75]


@pytest.mark.parametrize("salt", range(4))
@pytest.mark.parametrize("seconds", [DIP, [1.0, 1.1, 1.2, 1.3, 1.4], [1.0, 1.0, 1.6, 1.6, 1.6]])
def test_the_output_distribution_with_the_scheduler_in_the_loop_is_the_targets(seconds, salt: int):
    prices, limits = prices_of(seconds, num_certain=2), Limits(caps_R=np.full(2, 2))

    def plan_causal(c_RK):
        return causal(survival_of(c_RK), prices, limits)[1]

    output, target = exact_output(plan_causal, salt=salt)
    np.testing.assert_allclose(output, target, atol=1e-6)
    for history in ([[0.9, 0.9], [0.9, 0.2]], [[0.3, 0.3], [0.7, 0.6]]):
        history_RK = survival_of(np.array(history, dtype=np.float32))
        choice = choose_budget(history_RK, prices, limits)

        def plan_delayed(c_RK, choice=choice):
            return admit(survival_of(c_RK), choice, limits.caps_R)

        output, target = exact_output(plan_delayed, salt=salt)
        np.testing.assert_allclose(output, target, atol=1e-6)


def test_the_enumeration_finds_a_search_over_current_confidences_under_maximal_coupling():
    """The checker must be able to fail: the global search looks ahead and biases the text."""
    prices, limits = prices_of(DIP, num_certain=2), Limits(caps_R=np.full(2, 2))
    errors = []
    for salt in range(4):
        output, target = exact_output(
            lambda c_RK: free(survival_of(c_RK), prices, limits)[1], salt=salt
        )
        errors.append(np.abs(output - target).max())
    assert max(errors) > 1e-2


# Appendix A of the paper: one request, two positions, SPS(1), SPS(2), SPS(3) = 1, 0.5, 0.45.
APPENDIX = prices_of([1 / 1.0, 1 / 0.5, 1 / 0.45], num_certain=1)
APPENDIX_LIMITS = Limits(caps_R=np.array([2]))
HIGH = np.array([[0.8, 0.9]], dtype=np.float32)  # x_1 = A
LOW = np.array([[0.8, 0.0]], dtype=np.float32)  # x_1 = B


def first_token(plan) -> list[float]:
    """P(A), P(B) of the first token: p = (0.7, 0.3), q = (0.5, 0.5)."""
    p_V, q_V = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    output = np.zeros(2)
    for token, c_RK in ((0, HIGH), (1, LOW)):
        if plan(c_RK)[0] == 0:
            output += float(q_V[token]) * p_V.double().numpy()
            continue
        taken = float(accept_probability(p_V[token], q_V[token]))
        output[token] += float(q_V[token]) * taken
        rest_V = residual(p_V[None], q_V[None])[0].double().numpy()
        output += float(q_V[token]) * (1 - taken) * rest_V
    return output.tolist()


def test_appendix_a_rates():
    choice, _ = free(survival_of(HIGH), APPENDIX, APPENDIX_LIMITS)
    assert choice.rates_B.tolist() == pytest.approx([1.0, 0.9, 1.134])
    choice, _ = free(survival_of(LOW), APPENDIX, APPENDIX_LIMITS)
    assert choice.rates_B.tolist() == pytest.approx([1.0, 0.9])


def test_appendix_a_is_exact_under_causal_and_delayed():
    """UC-016: length 0 in both cases of the synchronous mode."""
    assert causal(survival_of(HIGH), APPENDIX, APPENDIX_LIMITS)[1].tolist() == [0]
    assert causal(survival_of(LOW), APPENDIX, APPENDIX_LIMITS)[1].tolist() == [0]
    plans = [lambda c_RK: causal(survival_of(c_RK), APPENDIX, APPENDIX_LIMITS)[1]]
    for history in (HIGH, LOW):
        choice = choose_budget(survival_of(history), APPENDIX, APPENDIX_LIMITS)
        plans.append(
            lambda c_RK, choice=choice: admit(survival_of(c_RK), choice, APPENDIX_LIMITS.caps_R)
        )
    for plan in plans:
        assert first_token(plan) == pytest.approx([0.7, 0.3])


def test_appendix_a_is_biased_under_the_forbidden_search():
    def forbidden(c_RK):
        return free(survival_of(c_RK), APPENDIX, APPENDIX_LIMITS)[1]

    assert forbidden(HIGH).tolist() == [2]
    assert forbidden(LOW).tolist() == [0]
    assert first_token(forbidden) == pytest.approx([0.85, 0.15])


def test_free_with_shared_noise_gives_the_text_of_plain_decoding():
    """And with maximal coupling it does not, on the same drafts."""

    def target(prefix):
        return toy_logits(prefix[-2:], vocab_size=4, salt=1)

    def drafter(prefix):
        return toy_logits(prefix[-2:], vocab_size=4, salt=1) + toy_logits(
            prefix[-1:], vocab_size=4, salt=2
        )

    prices, limits = (
        prices_of([1.0, 1.4, 1.45, 1.5, 2.1, 2.5, 2.55], num_certain=2),
        Limits(caps_R=np.full(2, 3)),
    )
    lengths_seen = set()

    def looks_ahead(drafted):
        c_RK = np.array(
            [[0.9] + [0.95 if token % 2 else 0.1 for token in ids[:2]] for ids in drafted],
            dtype=np.float32,
        )
        lengths = free(survival_of(c_RK), prices, limits)[1].tolist()
        lengths_seen.update(lengths)
        return lengths

    def texts(coupling: Coupling, plan):
        requests = [
            ToyRequest(params=SamplingParams(coupling=coupling), seed=seed) for seed in (3, 4)
        ]
        return decode(
            requests, target=target, drafter=drafter, num_tokens=60, block_size=3, plan=plan
        )

    plain = texts(Coupling.SHARED_NOISE, lambda drafted: [0, 0])
    assert texts(Coupling.SHARED_NOISE, looks_ahead) == plain
    assert len(lengths_seen) > 1
    assert texts(Coupling.MAXIMAL, looks_ahead) != texts(Coupling.MAXIMAL, lambda d: [0, 0])


@given(cases(max_requests=6), st.floats(0.0, 4.0), st.floats(0.0, 1.0))
def test_what_is_found_without_an_order_is_what_the_order_says(case, worth, price) -> None:
    confidence_RK, caps_R, seconds_B = case
    survival_RK = survival_of(confidence_RK)
    ranking = rank(survival_RK, caps_R)
    num_budgets = min(len(ranking.survival_J) + 1, len(seconds_B))
    gain_B = ranking.tokens(0)[:num_budgets] - worth * seconds_B[:num_budgets]
    found_R = free_gain(survival_RK, caps_R, seconds_B=seconds_B, worth=worth)
    assert gain_B[found_R.sum()] == pytest.approx(gain_B.max())
    assert found_R.tolist() == ranking.lengths(int(found_R.sum())).tolist()
    above = int((ranking.survival_J > np.float32(price)).sum())
    for most in range(above + 2):
        lengths_R = priced(survival_RK, caps_R, price=price, most=most)
        assert lengths_R.tolist() == ranking.lengths(min(most, above)).tolist()
