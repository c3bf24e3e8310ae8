"""From logits to tokens: mixed rows, temperature, errors, draws, log-probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.noise import Stream, row_keys, uniform
from dspark.algorithms.sampling import (
    RowContext,
    draw_categorical,
    draw_shared,
    process_logits,
    token_logprobs,
)
from dspark.core import SamplingParams
from dspark.errors import NumericsError
from tests.algorithms.toy_distributions import chi_square_p_value


def context(vocab_size: int, *, drafted=(), request_id: str = "a", **options) -> RowContext:
    state = LogitState(
        request_id=request_id,
        params=SamplingParams(**options),
        prompt_ids=[0],
        eos_ids=[],
        vocab_size=vocab_size,
    )
    return RowContext(state=state, drafted=drafted)


def test_temperature_alone_is_one_softmax():
    logits_NV = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    rows = [context(11, temperature=t) for t in (1.0, 0.5, 3.0)]
    probs_NV = process_logits(logits_NV, rows).probs()
    expected = (logits_NV.double() / torch.tensor([[1.0], [0.5], [3.0]])).softmax(-1)
    torch.testing.assert_close(probs_NV.double(), expected, atol=1e-7, rtol=1e-6)


def test_small_temperatures_are_not_blurred_by_large_logits():
    """log p = (x - max) / T: dividing first would lose the gap of 2^-10 beside a logit of 30."""
    logits_NV = torch.tensor([[30.0, 30.0 - 2**-10, 0.0]])
    probs = process_logits(logits_NV, [context(3, temperature=2e-4)]).probs()[0]
    assert float(probs[1] / probs[0]) == pytest.approx(math.exp(-(2**-10) / 2e-4), rel=1e-5)


def test_greedy_sampling_and_tiny_temperatures_mix_in_one_batch():
    """UC-007: no NaN; greedy rows are the one-hot they are alone, 1e-6 counts as greedy."""
    logits_NV = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).repeat(5, 1)
    temperatures = [0.0, 1.0, 0.0, 0.7, 1e-6]
    rows = [context(50, temperature=t) for t in temperatures]
    scores = process_logits(logits_NV, rows)
    probs_NV = scores.probs()
    assert not probs_NV.isnan().any()
    alone = process_logits(logits_NV[:1], rows[:1])
    for n in (0, 2, 4):
        assert torch.equal(probs_NV[n], alone.probs()[0])
        assert int(scores.best_N[n]) == int(alone.best_N[0])
        assert int((probs_NV[n] > 0).sum()) == 1
    for n in (1, 3):
        assert torch.equal(probs_NV[n], process_logits(logits_NV[:1], [rows[n]]).probs()[0])


def test_equal_logits_go_to_the_lowest_id_when_greedy():
    logits_NV = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).bfloat16()
    for options in ({}, {"logit_bias": {0: 0.5}}):
        scores = process_logits(logits_NV, [context(4, temperature=0.0, **options)])
        assert scores.best_N.tolist() == [1]
        assert scores.probs().tolist() == [[0, 1, 0, 0]]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.permutations(range(6)))
def test_a_row_does_not_depend_on_its_batch_mates(seed: int, order: list[int]):
    """UC-037, property: any order, any company, the same bits."""
    options = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "top_k": 3},
        {"top_p": 0.7, "repetition_penalty": 1.4},
        {"min_p": 0.2, "logit_bias": {2: 3.0}},
        {"temperature": 1.7, "top_p": 0.7},
    ]
    logits_NV = 3 * torch.randn(6, 17, generator=torch.Generator().manual_seed(seed))
    rows = [context(17, drafted=(3, 4), **item) for item in options]
    together = process_logits(logits_NV[order], [rows[n] for n in order]).probs()
    for place, n in enumerate(order):
        alone = process_logits(logits_NV[n : n + 1], [rows[n]]).probs()
        assert torch.equal(together[place], alone[0])
        assert float(alone.sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_equal_greedy(options: dict):
    """UC-034, on every row of a round."""
    logits_NV = torch.randn(20, 100, generator=torch.Generator().manual_seed(4))
    rows = [context(100, drafted=(1,) * n, **options) for n in range(20)]
    greedy = process_logits(logits_NV, [context(100, temperature=0.0)] * 20)
    assert torch.equal(process_logits(logits_NV, rows).probs(), greedy.probs())


def test_logits_are_never_changed_and_may_have_any_float_type():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits_NV = torch.randn(2, 9, generator=torch.Generator().manual_seed(5)).to(dtype)
        before = logits_NV.clone()
        rows = [context(9, temperature=0.3, top_k=2), context(9, bad_words=[[1]], temperature=0.0)]
        scores = process_logits(logits_NV, rows)
        scores.probs().fill_(0.5)
        assert scores.scores_NV.dtype == torch.float32
        assert torch.equal(logits_NV, before)


def test_bf16_logits_give_a_float32_distribution():
    """UC-004: near ties in bf16 are processed as float32 numbers."""
    logits_NV = torch.tensor([[8.0, 8.0 + 2**-5, 7.9375]]).bfloat16()
    probs = process_logits(logits_NV, [context(3, temperature=0.9)]).probs()
    assert probs.dtype == torch.float32
    expected = (logits_NV.double() / 0.9).softmax(-1)
    torch.testing.assert_close(probs.double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_request(bad: float, temperature: float):
    logits_NV = torch.zeros(2, 4)
    logits_NV[1, 2] = bad
    rows = [context(4, request_id=name, temperature=temperature) for name in ("fine", "broken")]
    with pytest.raises(NumericsError, match="'broken'"):
        process_logits(logits_NV, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_is_marked_and_harms_no_other(temperature: float):
    logits_NV = torch.tensor([[0.0, 1.0], [2.0, 1.0]])
    banned = context(2, temperature=temperature, bad_words=[[0], [1]])
    scores = process_logits(logits_NV, [context(2, temperature=temperature), banned])
    assert scores.impossible == [1]
    assert scores.probs().isfinite().all()
    alone = process_logits(logits_NV[:1], [context(2, temperature=temperature)])
    assert torch.equal(scores.probs()[0], alone.probs()[0])


def test_logits_of_minus_infinity_without_rules_are_impossible_too():
    scores = process_logits(torch.full((1, 3), -math.inf), [context(3, temperature=0.0)])
    assert scores.impossible == [0]


def test_probs_of_picked_rows_equal_those_of_all():
    logits_NV = torch.randn(4, 6, generator=torch.Generator().manual_seed(8))
    rows = [context(6, temperature=t) for t in (0.0, 1.0, 0.0, 0.5)]
    scores = process_logits(logits_NV, rows)
    assert torch.equal(scores.probs([3, 2]), scores.probs()[[3, 2]])


def test_categorical_draws_follow_their_weights_and_skip_zeros():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    count = 50_000
    seeds = torch.arange(count)
    uniforms = uniform(row_keys(seeds, torch.zeros_like(seeds), Stream.TARGET))
    drawn = draw_categorical(weights.expand(count, 6), uniforms)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert chi_square_p_value(counts, weights * count) > 1e-3


@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.5, 1.0]), min_size=1, max_size=9).filter(sum),
    st.one_of(st.sampled_from([0.0, 2.0**-33, 1 - 2.0**-33, 1 - 2.0**-53]), st.floats(0, 0.999)),
)
def test_categorical_draws_stay_in_the_support_at_the_edges(weights: list[float], u: float):
    drawn = int(draw_categorical(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)))
    assert weights[drawn] > 0


def test_shared_draws_do_not_depend_on_the_batch_or_on_the_order_of_columns():
    scores_RV = torch.randn(40, 9000, generator=torch.Generator().manual_seed(2))
    seed_R, position_R = torch.arange(40), torch.arange(40) % 7
    drawn = draw_shared(scores_RV, seed_R, position_R)
    for r in range(40):
        one = slice(r, r + 1)
        assert draw_shared(scores_RV[one], seed_R[one], position_R[one]).item() == drawn[r]
    order = torch.randperm(9000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(draw_shared(scores_RV[:, order], seed_R, position_R, order), drawn)


def test_shared_draws_follow_the_distribution_after_filters():
    count = 200_000
    row = context(6, temperature=0.8, top_k=4, min_p=0.05)
    logits_1V = torch.tensor([[1.0, -0.5, 0.3, 2.0, 0.0, -3.0]])
    scores = process_logits(logits_1V, [row])
    seeds = torch.arange(count)
    drawn = draw_shared(scores.scores_NV.expand(count, 6), seeds, torch.full_like(seeds, 3))
    counts = torch.bincount(drawn, minlength=6)
    assert chi_square_p_value(counts, scores.probs()[0] * count) > 1e-3


def test_logprobs_are_those_of_the_processed_distribution():
    logits_NV = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 0.0, 0.0]])
    rows = [context(4, temperature=2.0, top_k=3), context(4)]
    scores = process_logits(logits_NV, rows)
    first, second = token_logprobs(scores, rows=[0, 1], tokens=[1, 3], num_top=4)
    probs = scores.probs()
    assert first.chosen == pytest.approx(math.log(probs[0, 1]), abs=1e-6)
    assert [token for token, _ in first.top] == [0, 1, 2]
    for token, value in first.top:
        assert value == pytest.approx(math.log(probs[0, token]), abs=1e-6)
    assert second.top == [(token, pytest.approx(math.log(0.25))) for token in range(4)]


def test_top_logprobs_at_a_tie_go_by_lowest_id():
    scores = process_logits(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), [context(4)])
    (item,) = token_logprobs(scores, rows=[0], tokens=[1], num_top=2)
    assert [token for token, _ in item.top] == [0, 2]
    (none,) = token_logprobs(scores, rows=[0], tokens=[1], num_top=0)
    assert none.top == []


def test_greedy_logprobs_show_the_logits_at_temperature_one():
    logits_NV = torch.tensor([[2.0, 1.0, 0.0]]).bfloat16()
    for options in ({}, {"logit_bias": {2: -1.0}}):
        scores = process_logits(logits_NV, [context(3, temperature=0.0, **options)])
        (item,) = token_logprobs(scores, rows=[0], tokens=[0], num_top=3)
        expected = logits_NV[0].float() + torch.tensor([0.0, 0.0, -1.0 if options else 0.0])
        assert item.chosen == pytest.approx(float(expected.log_softmax(-1)[0]), abs=1e-6)
        assert len(item.top) == 3
