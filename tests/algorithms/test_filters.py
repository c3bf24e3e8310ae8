"""Top-k, top-p and min-p against a plain full sort, ties included."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.algorithms.filters import Filter, filter_scores_, keep_prefixes_
from dspark.core import SamplingParams


def kept_by_full_sort(scores: list[float], tokens: Filter) -> set[int]:
    ranking = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if tokens.top_k is not None:
        ranking = ranking[: tokens.top_k]
    masses = {token: math.exp(scores[token] - scores[ranking[0]]) for token in ranking}
    total, before, kept = sum(masses[token] for token in ranking), 0.0, []
    for token in ranking:
        if tokens.top_p < 1.0 and before >= tokens.top_p * total:
            break
        kept.append(token)
        before += masses[token]
    return {token for token in kept if masses[token] >= tokens.min_p and scores[token] > -math.inf}


def filtered(scores_FV: torch.Tensor, tokens: Filter) -> torch.Tensor:
    result_FV = scores_FV.clone()
    filter_scores_(result_FV, tokens)
    return result_FV


def kept_by_filter(scores: list[float], tokens: Filter) -> set[int]:
    scores_1V = torch.tensor([scores], dtype=torch.float32)
    result_V = filtered(scores_1V, tokens)[0]
    kept = result_V > -math.inf
    assert torch.equal(result_V[kept], scores_1V[0][kept])
    return set(kept.nonzero()[:, 0].tolist())


# Quarters of powers of e are exact scores whose masses never meet a threshold by chance.
score_rows = st.lists(
    st.one_of(st.integers(-12, 0).map(lambda x: x / 4), st.just(-math.inf)), min_size=1, max_size=40
).map(lambda row: [0.0, *row])


@settings(max_examples=300, deadline=None)
@given(
    scores=score_rows,
    top_k=st.one_of(st.none(), st.integers(1, 50)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99).map(lambda x: round(x, 3) + 1.7e-4)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.99).map(lambda x: round(x, 3) + 1.7e-4)),
)
def test_any_filter_keeps_what_a_full_sort_keeps(scores, top_k, top_p, min_p):
    """UC-034; most rows hold ties, and ties go by lowest id."""
    tokens = Filter(top_k=top_k, top_p=min(top_p, 1.0), min_p=min_p)
    assert kept_by_filter(scores, tokens) == kept_by_full_sort(scores, tokens)


def test_top_k_keeps_exactly_k_even_when_all_scores_tie():
    assert kept_by_filter([0.0] * 9, Filter(top_k=4)) == {0, 1, 2, 3}
    assert kept_by_filter([-1.0, 0.0, -1.0, -1.0], Filter(top_k=2)) == {0, 1}


def test_top_p_keeps_the_first_of_equals_when_it_is_tiny():
    assert kept_by_filter([-1.0, 0.0, 0.0, 0.0], Filter(top_p=1e-6)) == {1}


def test_top_p_keeps_the_token_that_crosses_the_mass():
    probs = [0.5, 0.3, 0.2]
    scores = [math.log(p / 0.5) for p in probs]
    assert kept_by_filter(scores, Filter(top_p=0.49)) == {0}
    assert kept_by_filter(scores, Filter(top_p=0.51)) == {0, 1}
    assert kept_by_filter(scores, Filter(top_p=0.81)) == {0, 1, 2}


def test_top_p_applies_to_what_top_k_left():
    scores = [math.log(p / 0.4) for p in (0.4, 0.2, 0.2, 0.2)]
    # Of the two kept by top-k the first holds two thirds.
    assert kept_by_filter(scores, Filter(top_k=2, top_p=0.6)) == {0}
    assert kept_by_filter(scores, Filter(top_p=0.6 + 1e-3)) == {0, 1, 2}


def test_min_p_is_relative_to_the_most_likely_token_and_keeps_equals():
    scores = [math.log(p / 0.4) for p in (0.4, 0.25, 0.25, 0.1)]
    assert kept_by_filter(scores, Filter(min_p=0.5)) == {0, 1, 2}
    assert kept_by_filter([0.0, -1.0, 0.0], Filter(min_p=1.0)) == {0, 2}


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 5000),
    step=st.sampled_from([0.0, 0.1, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 4.0]),
    tokens=st.builds(
        Filter,
        top_k=st.one_of(st.none(), st.integers(1, 60), st.integers(1, 6000)),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05, 1e-6]),
        min_p=st.sampled_from([0.0, 0.02, 1.0]),
    ),
    seed=st.integers(0, 2**31),
)
def test_long_rows_keep_what_a_sort_of_their_ids_keeps(size, step, temperature, tokens, seed):
    """The definition with its float sums, over a stable ranking of all ids."""
    scores_V = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    if step:
        scores_V = np.round(scores_V / np.float32(step)) * np.float32(step)
    scores_V = (scores_V - scores_V.max()) / np.float32(temperature)
    ranking = np.argsort(-scores_V, kind="stable")[: tokens.top_k]
    if tokens.top_p < 1.0:
        running = np.cumsum(np.exp(scores_V[ranking]), dtype=np.float64)
        ranking = ranking[np.concatenate([[True], running[:-1] < tokens.top_p * running[-1]])]
    if tokens.min_p > 0.0:
        ranking = ranking[scores_V[ranking] >= np.float32(math.log(tokens.min_p))]
    expected_V = np.full(size, -np.inf, dtype=np.float32)
    expected_V[ranking] = scores_V[ranking]
    result_FV = filtered(torch.from_numpy(np.stack([scores_V, scores_V])), tokens)
    assert np.array_equal(result_FV.numpy(), np.stack([expected_V, expected_V]))


@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize(
    "tokens",
    [Filter(top_k=40), Filter(top_p=0.9), Filter(top_k=40, top_p=0.7), Filter(top_k=9000)],
)
def test_rows_filtered_at_once_keep_what_rows_one_by_one_keep(tokens: Filter, step: float):
    scores_FV = torch.randn(5, 5000, generator=torch.Generator().manual_seed(8)) * 2.0
    if step:
        scores_FV = (scores_FV / step).round() * step
    scores_FV -= scores_FV.amax(-1, keepdim=True)
    at_once_FV = scores_FV.clone()
    keep_prefixes_(at_once_FV, tokens)
    assert torch.equal(at_once_FV, filtered(scores_FV, tokens))


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_row_does_not_depend_on_its_batch_mates(size: int):
    """Rows of one batch keep prefixes of very different lengths."""
    generator = torch.Generator().manual_seed(3)
    scores_FV = torch.randn(7, 5000, generator=generator) * torch.tensor(
        [[0.01], [0.1], [0.5], [1.0], [2.0], [4.0], [8.0]]
    )
    scores_FV -= scores_FV.amax(-1, keepdim=True)
    for tokens in (Filter(top_p=0.9), Filter(top_k=30, top_p=0.9), Filter(top_k=30)):
        whole_FV = filtered(scores_FV, tokens)
        parts = [filtered(part, tokens) for part in torch.split(scores_FV, size)]
        assert torch.equal(torch.cat(parts), whole_FV)


def test_filters_come_from_a_requests_options():
    params = SamplingParams(top_k=3, top_p=0.5, min_p=0.1)
    assert Filter.of(params) == Filter(top_k=3, top_p=0.5, min_p=0.1)
    assert Filter.of(SamplingParams()).keeps_all
    assert not Filter.of(params).keeps_all
