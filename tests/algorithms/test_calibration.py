"""Scalings, sampling classes, files; sequential temperature scaling on planted temperatures."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.calibration import Calibration, SamplingClass, Scaling
from dspark.algorithms.calibration_metrics import (
    ConfidenceRounds,
    calibration_by_position,
    mean_ece,
)
from dspark.algorithms.survival import survival
from dspark.algorithms.temperature_scaling import GRID, fit_temperatures
from dspark.core import SamplingParams
from dspark.errors import ModelError
from tests.algorithms.toy_rounds import draw, in_full, rescaled, sigmoid


def test_the_identity_is_the_drafters_own_survival():
    """UC-130: survival is the running product of the conditional confidences."""
    logits_RK = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    found_RK = Scaling.identity(5).survival(logits_RK.numpy())
    np.testing.assert_allclose(found_RK, survival(logits_RK).numpy(), rtol=1e-5)
    assert found_RK.dtype == np.float32


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=8, max_size=8),
    st.lists(st.floats(0.125, 8.0), min_size=4, max_size=4),
)
def test_scaling_keeps_the_order_of_confidences_and_survival_falls(values, temperatures):
    logits_RK = np.array(values, dtype=np.float32).reshape(2, 4)
    scaling = Scaling.of_temperatures(temperatures)
    a_RK = scaling.survival(logits_RK)
    assert (np.diff(a_RK, axis=1) <= 0).all()
    for slot in range(4):
        alone = [
            float(
                Scaling.of_temperatures([temperatures[slot]]).survival(
                    logits_RK[r, slot : slot + 1, None]
                )[0, 0]
            )
            for r in range(2)
        ]
        if logits_RK[0, slot] < logits_RK[1, slot]:
            assert alone[0] <= alone[1]


def test_a_logit_that_is_no_number_ends_the_block():
    logits_RK = np.array([[2.0, np.nan, 9.0], [-np.inf, 1.0, 1.0]], dtype=np.float32)
    a_RK = Scaling.identity(3).survival(logits_RK)
    assert a_RK[0].tolist() == [pytest.approx(sigmoid(2.0)), 0.0, 0.0]
    assert a_RK[1].tolist() == [0.0, 0.0, 0.0]


def test_each_sampling_class_has_its_own_scaling_and_borrows_its_neighbours():
    """UC-132: what was fitted at one temperature is not silently used as if it held at all."""
    calibration = Calibration(
        scalings={
            SamplingClass.GREEDY: Scaling.of_temperatures([1.0]),
            SamplingClass.WARM: Scaling.of_temperatures([2.0]),
        }
    )
    classes = [SamplingClass.of(SamplingParams(temperature=t)) for t in (0.0, 1e-6, 0.5, 0.75, 1.0)]
    assert classes == ["greedy", "greedy", "cool", "warm", "warm"]
    logits_RK = np.full((5, 1), 2.0, dtype=np.float32)
    expected = [sigmoid(2.0)] * 3 + [sigmoid(1.0)] * 2
    assert calibration.survival(logits_RK, classes)[:, 0].tolist() == pytest.approx(expected)
    same = calibration.survival(logits_RK, [SamplingClass.WARM] * 5)
    assert same[:, 0].tolist() == pytest.approx([sigmoid(1.0)] * 5)


def test_json_round_trip_and_other_engines_temperatures():
    calibration = Calibration(
        scalings={
            SamplingClass.COOL: Scaling(scales=(0.5, 0.25), biases=(0.0, -1.0)),
            SamplingClass.GREEDY: Scaling.identity(2),
        }
    )
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration
    for key in ("temperatures", "sts_temperatures"):
        read = Calibration.from_json({key: [1.0, 2.0, 4.0]})
        assert read.scaling(SamplingClass.GREEDY).scales == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"version": 2, "classes": {}},
        {"version": 1, "classes": {}},
        {"version": 1, "classes": {"hot": {"scales": [1.0], "biases": [0.0]}}},
        {"version": 1, "classes": {"warm": {"scales": [1.0], "biases": []}}},
        {"version": 1, "classes": {"warm": {"scales": [-1.0], "biases": [0.0]}}},
        {"version": 1, "classes": {"warm": {"scales": [float("nan")], "biases": [0.0]}}},
        {"temperatures": [1.0, 0.0]},
        {"temperatures": []},
        {"temperatures": "hot"},
        {
            "version": 1,
            "classes": {
                "warm": {"scales": [1.0], "biases": [0.0]},
                "greedy": {"scales": [1.0, 1.0], "biases": [0.0, 0.0]},
            },
        },
    ],
)
def test_damaged_files_are_refused(data):
    with pytest.raises(ModelError):
        Calibration.from_json(data)


def test_planted_temperatures_are_found_within_a_step_of_the_grid():
    """UC-127: 1.5, 2 and 3, left to right."""
    truth = np.array([1.5, 2.0, 3.0])
    logits_NK, accepted_N = draw(
        lambda z: sigmoid(z / truth), num_rounds=40_000, block_size=3, seed=3
    )
    fitted = fit_temperatures(in_full(logits_NK, accepted_N))
    # each step of the grid is 4.4 %; the error of a fit from 40,000 rounds is of that size
    np.testing.assert_allclose(fitted.temperatures, truth, rtol=0.07)
    assert fitted.num_rounds == (40_000,) * 3


def test_the_calibration_error_falls_at_every_position():
    truth = np.array([1.3, 1.8, 2.0, 2.5, 2.5])
    logits_NK, accepted_N = draw(lambda z: sigmoid(z / truth), num_rounds=6_000, seed=1)
    fitted = fit_temperatures(in_full(logits_NK, accepted_N)).scaling
    for seed, least_gain in ((1, 1.0), (2, 1.0)):  # the rounds of the fit, then others
        logits_NK, accepted_N = draw(lambda z: sigmoid(z / truth), num_rounds=6_000, seed=seed)
        before = calibration_by_position(in_full(logits_NK, accepted_N))
        scaled_NK = rescaled(logits_NK, fitted.survival(logits_NK))
        after = calibration_by_position(in_full(scaled_NK, accepted_N))
        for old, new in zip(before, after, strict=True):
            assert new.ece < least_gain * old.ece
            assert new.auroc is not None
            assert old.auroc is not None
        assert mean_ece(after) < 0.015 < mean_ece(before)
        # one position: the order of confidences is untouched, so is the area
        assert after[0].auroc == pytest.approx(before[0].auroc, abs=1e-6)


def test_positions_with_few_rounds_keep_their_own_confidence_and_say_so():
    """UC-131."""
    logits_NK, accepted_N = draw(lambda z: sigmoid(z / 3), num_rounds=400, block_size=2)
    rounds = ConfidenceRounds(
        logits_RK=torch.from_numpy(logits_NK),
        verified_R=torch.tensor([1] * 350 + [2] * 50),
        accepted_R=torch.from_numpy(np.minimum(accepted_N, [1] * 350 + [2] * 50)),
    )
    fitted = fit_temperatures(rounds)
    assert fitted.temperatures[0] > 1.5
    assert fitted.temperatures[1] == 1.0
    assert fitted.num_rounds == (400, 50)


def test_trimmed_positions_are_no_rejections():
    """UC-128: trimming that does not look at confidences leaves the fit where it was."""
    truth = np.array([2.0, 2.0, 2.0])
    logits_NK, accepted_N = draw(lambda z: sigmoid(z / truth), num_rounds=60_000, block_size=3)
    verified_N = np.random.default_rng(5).integers(0, 4, 60_000)
    rounds = ConfidenceRounds(
        logits_RK=torch.from_numpy(logits_NK),
        verified_R=torch.from_numpy(verified_N),
        accepted_R=torch.from_numpy(np.minimum(accepted_N, verified_N)),
    )
    np.testing.assert_allclose(fit_temperatures(rounds).temperatures, truth, rtol=0.15)


def test_ties_of_the_grid_go_to_the_temperature_nearest_to_one():
    rounds = ConfidenceRounds(
        logits_RK=torch.zeros(200, 1),
        verified_R=torch.ones(200, dtype=torch.int64),
        accepted_R=torch.ones(200, dtype=torch.int64),
    )
    assert fit_temperatures(rounds).temperatures == (1.0,)
    assert 1.0 in GRID
