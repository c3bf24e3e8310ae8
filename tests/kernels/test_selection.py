import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.kernels import extension
from dspark.kernels.selection import argmax, gumbel_argmax


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn_by_pytorch(*arguments: Tensor | None) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "IS_LOADED", False)
        return gumbel_argmax(*arguments)  # type: ignore[arg-type]


@given(
    n=st.integers(1, 5),
    width=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_argmax_is_the_lowest_of_the_largest(
    instructions: str, n: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    scores = (3 * random(n, width + 3, seed=seed)).round().to(dtype)[:, :width]  # many ties
    assert torch.equal(argmax(scores), (scores == scores.amax(1, keepdim=True)).int().argmax(1))


def test_argmax_of_excluded_tokens_is_the_first(instructions: str) -> None:
    assert argmax(torch.full((2, 37), -torch.inf)).tolist() == [0, 0]


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
    assert torch.equal(gumbel_argmax(*arguments), drawn_by_pytorch(*arguments))


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
    torch.library.opcheck(torch.ops.dspark.argmax.default, (scores,))
    torch.library.opcheck(torch.ops.dspark.gumbel_argmax.default, (scores, zeros, zeros, None))
    ids = torch.arange(9)
    torch.library.opcheck(torch.ops.dspark.gumbel_argmax.default, (scores, zeros, zeros, ids))
