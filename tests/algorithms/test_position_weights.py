import math

import pytest
import torch

from dspark.algorithms import position_weights
from dspark.algorithms.position_weights import PositionWeights
from dspark.errors import InputError


def test_decayed_weights_fall_from_one_and_vanish_where_invalid():
    valid_RK = torch.tensor([[True, True, True], [True, False, False]])
    weights_RK = position_weights.decayed(valid_RK, decay=4.0)
    expected = [1.0, math.exp(-0.25), math.exp(-0.5)]
    assert weights_RK[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert weights_RK[1].tolist() == [1.0, 0.0, 0.0]


def test_dpace_weights_are_the_suffix_sums_of_the_smoothed_survivals():
    """arXiv 2605.18810, Eq. 7 and 8, by hand; the second block ends after two slots."""
    confidence_RK = torch.tensor([[0.8, 0.2, 0.6], [0.4, 1.0, 0.9]])
    valid_RK = torch.tensor([[True, True, True], [True, True, False]])
    found = position_weights.dpace(confidence_RK, valid_RK, alpha=0.5)
    a, b, c = 0.9, 0.9 * 0.6, 0.9 * 0.6 * 0.8
    d, e = 0.7, 0.7 * 1.0
    expected = torch.tensor([[a + b + c, b + c, c], [d + e, e, 0.0]])
    torch.testing.assert_close(found, expected)


def test_dpace_weights_are_the_gradient_of_the_expected_accepted_length():
    confidence_RK = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).double()
    log_RK = confidence_RK.log().requires_grad_()
    log_RK.exp().cumprod(dim=1).sum().backward()  # type: ignore[no-untyped-call]
    valid_RK = torch.ones(5, 4, dtype=torch.bool)
    found = position_weights.dpace(confidence_RK, valid_RK, alpha=1e-9)
    torch.testing.assert_close(found.double(), log_RK.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "fixed"}, "Position weights are 'fixed'"),
        ({"decay": 0.0}, "decay is 0.0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ],
)
def test_rules_that_cannot_be_are_refused(values: dict[str, object], words: str):
    with pytest.raises(InputError, match=words):
        PositionWeights(**values)
