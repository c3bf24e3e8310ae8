import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.algorithms import filters as reference
from dspark.algorithms import sampling
from dspark.algorithms.filters import Filter
from dspark.kernels.selection import (
    best,
    draw_categorical,
    filter_rows_,
    gumbel_argmax,
    softmax,
)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    n=st.integers(1, 5),
    width=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_best_column_is_the_lowest_of_the_largest(
    instructions: str, n: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    scores = (3 * random(n, width + 3, seed=seed)).round().to(dtype)[:, :width]  # many ties
    max_N, best_N = best(scores)
    assert torch.equal(best_N, (scores == scores.amax(1, keepdim=True)).int().argmax(1))
    assert torch.equal(max_N, scores.amax(1).float())


def test_the_best_of_excluded_tokens_is_the_first(instructions: str) -> None:
    max_N, best_N = best(torch.full((2, 37), -torch.inf))
    assert best_N.tolist() == [0, 0]
    assert max_N.tolist() == [-torch.inf, -torch.inf]


@pytest.mark.parametrize("column", [0, 15, 16, 36])
def test_nan_anywhere_in_a_row_is_told(instructions: str, column: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        scores = torch.zeros((3, 37), dtype=dtype)
        scores[1, column] = torch.nan
        assert best(scores)[0].isnan().tolist() == [False, True, False]


@given(
    n=st.integers(1, 4),
    width=st.integers(1, 2500),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([0.0, 2.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_softmax_is_the_softmax(
    instructions: str, n: int, width: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    scores = (scale * random(n, width, seed=seed)).to(dtype)
    scores[:, 1::3] = -torch.inf
    expected = scores.double().softmax(-1)
    probs = softmax(scores)
    torch.testing.assert_close(probs.double(), expected, atol=1e-7, rtol=3e-6)
    assert not bool(probs[:, 1::3].any())
    for row in range(n):  # no row depends on its mates
        assert torch.equal(softmax(scores[row : row + 1])[0], probs[row])


@given(
    n=st.integers(1, 5),
    width=st.integers(1, 4000),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 9999),
    edge=st.sampled_from([None, 0.0, 1.0 - 2.0**-33]),
)
def test_a_categorical_draw_is_that_of_pytorch(
    instructions: str, n: int, width: int, zeros: float, seed: int, edge: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand((n, width), generator=generator) ** 8
    weights[torch.rand((n, width), generator=generator) < zeros] = 0.0
    weights[:, seed % width] += 1e-3
    uniforms = torch.rand(n, generator=generator, dtype=torch.float64)
    if edge is not None:
        uniforms[:] = edge
    columns = draw_categorical(weights, uniforms)
    assert torch.equal(columns, sampling.draw_categorical(weights, uniforms))
    assert bool((weights.gather(1, columns[:, None]) > 0).all())
    # the inverse of the cumulative distribution, but for what rounding may move
    below = (weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)).gather(
        1, columns[:, None]
    )[:, 0]
    assert bool((below >= uniforms - 1e-12).all())


@given(
    n=st.integers(1, 6),
    width=st.integers(1, 3000),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    excluded=st.sampled_from([0.0, 0.5, 0.99]),
    has_ids=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**40),
)
def test_the_draw_is_that_of_the_shared_noise(
    instructions: str,
    n: int,
    width: int,
    scale: float,
    excluded: float,
    has_ids: bool,
    seed: int,
    position: int,
) -> None:
    """Target and drafter draw by the same noise, whichever path computed it."""
    scores = scale * random(n, width, seed=seed % 1000)
    mask = torch.rand(n, width, generator=torch.Generator().manual_seed(seed % 1001)) < excluded
    scores[mask] = -torch.inf
    seeds = torch.full((n,), seed) - torch.arange(n)
    positions = position + torch.arange(n)
    ids = torch.randperm(150_000, generator=torch.Generator().manual_seed(seed % 1002))[:width]
    arguments = (scores, seeds, positions, ids if has_ids else None)
    assert torch.equal(gumbel_argmax(*arguments), sampling.draw_shared(*arguments))


def test_draws_follow_the_distribution(instructions: str) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    num_draws = 20_000
    ids = gumbel_argmax(
        probs.log().expand(num_draws, 5).contiguous(),
        torch.full((num_draws,), 7),
        torch.arange(num_draws),
    )
    frequency = torch.bincount(ids, minlength=5) / num_draws
    assert float((frequency - probs).abs().max()) < 0.015
    assert float(frequency[4]) == 0.0


def test_operators_keep_pytorchs_rules(instructions: str) -> None:
    scores, zeros = random(2, 9, seed=1), torch.zeros(2, dtype=torch.int64)
    torch.library.opcheck(torch.ops.dspark.best.default, (scores,))
    torch.library.opcheck(torch.ops.dspark.softmax.default, (scores,))
    uniforms = torch.rand(2, dtype=torch.float64)
    torch.library.opcheck(torch.ops.dspark.draw_categorical.default, (scores.abs(), uniforms))
    torch.library.opcheck(torch.ops.dspark.gumbel_argmax.default, (scores, zeros, zeros, None))
    ids = torch.arange(9)
    torch.library.opcheck(torch.ops.dspark.gumbel_argmax.default, (scores, zeros, zeros, ids))


def kept_by_definition(scores_V: Tensor, tokens: Filter) -> tuple[set[int], set[int]]:
    """What is kept whatever top-p's roundings are, and what may be."""
    ranking = sorted(range(len(scores_V)), key=lambda i: (-float(scores_V[i]), i))[: tokens.top_k]
    masses = scores_V.double().exp()
    total, before = float(masses[ranking].sum()), 0.0
    surely, perhaps = set(), set()
    least = -torch.inf if tokens.min_p == 0.0 else math.log(tokens.min_p)
    for index in ranking:
        if tokens.top_p < 1.0 and before > (tokens.top_p + 1e-6) * total:
            break
        if scores_V[index] >= torch.tensor(least, dtype=torch.float32):
            perhaps.add(index)
            if tokens.top_p == 1.0 or before < (tokens.top_p - 1e-6) * total:
                surely.add(index)
        before += float(masses[index])
    return surely, perhaps


filters = st.builds(
    Filter,
    top_k=st.one_of(st.none(), st.sampled_from([1, 7, 64, 200, 900, 9000])),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.sampled_from([0.0, 0.01, 0.4]),
)


@given(
    rows=st.lists(filters, min_size=1, max_size=4),
    width=st.sampled_from([1, 5, 63, 65, 700, 4100, 5003]),
    scale=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    step=st.sampled_from([0.0, 0.25]),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 9999),
)
def test_filters_keep_what_their_definition_keeps(
    instructions: str,
    rows: list[Filter],
    width: int,
    scale: float,
    step: float,
    num_threads: int,
    seed: int,
) -> None:
    """UC-034. With a step, many scores are equal; they go by lowest column."""
    scores = scale * random(len(rows), width, seed=seed)
    if step:
        scores = (scores / step).round() * step
    scores[:, 1::7] = -torch.inf
    scores -= scores.amax(1, keepdim=True)
    found, before = scores.clone(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        filter_rows_(found, rows)
    finally:
        torch.set_num_threads(before)
    for row, tokens in enumerate(rows):
        kept = set((found[row] > -torch.inf).nonzero()[:, 0].tolist())
        surely, perhaps = kept_by_definition(scores[row], tokens)
        possible = set((scores[row] > -torch.inf).nonzero()[:, 0].tolist())
        assert surely & possible <= kept <= perhaps
        assert torch.equal(found[row][list(kept)], scores[row][list(kept)])


@pytest.mark.parametrize("width", [50, 4096, 6000])
def test_a_top_p_that_equal_scores_meet_exactly_goes_by_the_sort(
    instructions: str, width: int
) -> None:
    """Half of the tokens hold just half of the mass, and roundings must not keep one more."""
    scores = torch.zeros((1, width))
    filter_rows_(scores, [Filter(top_p=0.5)])
    assert (scores[0] == 0.0).nonzero()[:, 0].tolist() == list(range(width // 2))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_long_rows_are_filtered_as_the_reference_does(
    instructions: str, temperature: float
) -> None:
    """Rows like a language model's; no top-p here has a token on its very edge."""
    scores = 4.0 * random(6, 49_152, seed=3) / temperature
    scores -= scores.amax(1, keepdim=True)
    rows = [
        Filter(top_p=0.9),
        Filter(top_p=0.5, min_p=0.001),
        Filter(top_k=50),
        Filter(top_k=20, top_p=0.95),
        Filter(top_k=2000, top_p=0.6),
        Filter(),
    ]
    expected = scores.clone()
    reference.filter_rows_(expected, rows)
    filter_rows_(scores, rows)
    assert torch.equal(scores, expected)
