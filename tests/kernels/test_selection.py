import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.algorithms import sampling
from dspark.kernels.selection import best, draw_categorical, gumbel_argmax, softmax


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
