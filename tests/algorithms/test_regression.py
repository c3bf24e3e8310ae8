"""Least squares from sums, and the view of features that predicts best."""

import torch

from dspark.algorithms.regression import Moments, predictive_view, reflection, ridge


def rows(count: int, size: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def moments_of(x_NF: torch.Tensor, y_NY: torch.Tensor) -> Moments:
    """Of all rows, added in two parts."""
    moments = Moments.empty(x_NF.shape[1], y_NY.shape[1], device=x_NF.device)
    half = len(x_NF) // 2
    moments.add(x_NF[:half], y_NY[:half])
    moments.add(x_NF[half:], y_NY[half:])
    return moments


def test_planted_weights_are_found_and_a_penalty_shrinks_them() -> None:
    x_NF, planted_FY = rows(200, 6), rows(6, 3, seed=1)
    moments = moments_of(x_NF, x_NF @ planted_FY)
    found_FY = ridge(moments.gram_FF, moments.cross_FY, share=1e-6)
    torch.testing.assert_close(found_FY, planted_FY, atol=1e-4, rtol=0)
    shrunk_FY = ridge(moments.gram_FF, moments.cross_FY, share=1.0)
    assert shrunk_FY.norm() < 0.7 * planted_FY.norm()


def test_a_row_of_weight_two_counts_as_two_rows() -> None:
    x_NF, y_NY = rows(5, 3), rows(5, 2, seed=1)
    weighted = Moments.empty(3, 2, device=x_NF.device)
    weighted.add(x_NF, y_NY, torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0]))
    twice = moments_of(torch.cat((x_NF, x_NF[1:2])), torch.cat((y_NY, y_NY[1:2])))
    torch.testing.assert_close(weighted.gram_FF, twice.gram_FF)
    torch.testing.assert_close(weighted.cross_FY, twice.cross_FY)
    torch.testing.assert_close(weighted.sum_F, twice.sum_F)


def test_a_view_begins_with_the_constant_and_keeps_what_predicts() -> None:
    """Two of eight features matter, by far not those of the largest size, and one is 1."""
    x_NF = rows(4000, 8) * torch.tensor([9.0, 9.0, 9.0, 0.5, 0.5, 9.0, 9.0, 0.0])
    x_NF[:, 7] = 1.0
    y_NY = x_NF[:, 3:5] @ rows(2, 5, seed=1) + 2.0
    moments = moments_of(x_NF, y_NY)
    view_DF = predictive_view(
        moments.gram_FF / 4000, moments.cross_FY / 4000, moments.sum_F / 4000, size=4, share=1e-6
    )
    seen_ND = x_NF @ view_DF.T
    assert seen_ND[:, 0].std() < 1e-2
    torch.testing.assert_close(seen_ND[:, 0].mean(), torch.tensor(1.0), atol=1e-2, rtol=0)
    torch.testing.assert_close(seen_ND.T @ seen_ND / 4000, torch.eye(4), atol=1e-2, rtol=0)
    few = moments_of(seen_ND[:, :3], y_NY)
    found_FY = ridge(few.gram_FF, few.cross_FY, share=1e-6)
    assert (seen_ND[:, :3] @ found_FY - y_NY).square().mean() < 1e-3 * y_NY.var()


def test_a_view_that_is_wider_than_its_outputs_ends_in_zeros() -> None:
    x_NF = rows(100, 8)
    moments = moments_of(x_NF, x_NF[:, :2])
    view_DF = predictive_view(moments.gram_FF, moments.cross_FY, moments.sum_F, size=6, share=1e-6)
    assert view_DF.shape == (6, 8)
    assert bool((view_DF[:3].abs().sum(dim=1) > 0).all())
    assert bool((view_DF[3:] == 0).all())


def test_a_reflection_is_orthogonal_and_takes_the_first_axis_there() -> None:
    direction_D = rows(1, 5)[0]
    turn_DD = reflection(direction_D)
    torch.testing.assert_close(turn_DD @ turn_DD.T, torch.eye(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(turn_DD[:, 0], direction_D / direction_D.norm())
