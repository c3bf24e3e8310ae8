"""Confidences that no head gave."""

import math

import numpy as np
import pytest
import torch

from dspark.algorithms.calibration import SamplingClass
from dspark.algorithms.confidence import log_odds_of_best, uninformed


def test_the_odds_are_those_of_the_likeliest_token_and_finite() -> None:
    logits_RS = torch.tensor([[3.0, 1.0, 0.5], [2.0, 2.0, -math.inf], [9.0, -math.inf, -math.inf]])
    best_R = logits_RS.softmax(-1).amax(-1)
    found_R = log_odds_of_best(logits_RS)
    torch.testing.assert_close(found_R[:2], (best_R / (1.0 - best_R)).log()[:2])
    assert found_R[1] == pytest.approx(0.0, abs=1e-6)
    assert found_R[2] == pytest.approx(13.8, abs=0.1)
    torch.testing.assert_close(log_odds_of_best(logits_RS[:1] - 50.0), found_R[:1])


def test_before_anything_is_observed_every_position_survives_alike() -> None:
    scaling = uninformed(3).scaling(SamplingClass.GREEDY)
    a_RK = scaling.survival(np.array([[0.0, 5.0, 40.0]], dtype=np.float32))
    assert a_RK[0].tolist() == pytest.approx([0.8, 0.64, 0.512], abs=0.01)
