"""Calibration of a drafter that says too much: fitted, judged on other prompts, kept beside it."""

import numpy as np
import pytest
import torch

from dspark.algorithms.calibration import SamplingClass
from dspark.algorithms.calibration_metrics import (
    ConfidenceRounds,
    calibration_by_position,
    mean_ece,
)
from dspark.benchmarks.calibration import (
    CalibrationConfig,
    calibrate,
    fit,
    noise_of_ece,
    scaled,
    table_rows,
)
from dspark.benchmarks.plots import save_calibration
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.models.drafter import Drafter

PROMPTS = [[5 + i, 6, 7, 8 + i] for i in range(8)]
TASKS = {"math": PROMPTS[::2], "code": PROMPTS[1::2]}
CONFIG = CalibrationConfig(temperatures=(1.0, 0.0), max_new_tokens=96)


def planted(*, scale: float, bias: float, num_rounds: int = 4000) -> ConfidenceRounds:
    """Rounds accepted with sigmoid(scale * logit + bias)."""
    rng = np.random.default_rng(0)
    logits_NK = rng.normal(1.0, 1.5, (num_rounds, 4)).astype(np.float32)
    chance_NK = 1.0 / (1.0 + np.exp(-(scale * logits_NK + bias)))
    accepted_N = (rng.random(logits_NK.shape) < chance_NK).cumprod(1).sum(1)
    return ConfidenceRounds(
        logits_RK=torch.tensor(logits_NK),
        verified_R=torch.full((num_rounds,), 4),
        accepted_R=torch.tensor(accepted_N),
    )


def test_a_planted_scale_and_bias_are_found() -> None:
    rounds = planted(scale=0.6, bias=-0.8)
    found = fit(rounds)
    assert found.scales[0] == pytest.approx(0.6, abs=0.06)
    assert found.biases[0] == pytest.approx(-0.8, abs=0.1)
    before, after = calibration_by_position(rounds), calibration_by_position(scaled(rounds, found))
    assert all(b.ece < 0.03 for b in after)
    assert before[0].ece > 0.1
    assert after[0].auroc == pytest.approx(before[0].auroc, abs=1e-6)


def test_a_random_drafter_is_judged_by_the_fit_of_other_prompts(llm: LLM, tmp_path) -> None:
    report = calibrate(llm, TASKS, config=CONFIG)
    assert [found.sampling_class for found in report.classes] == ["warm", "greedy"]
    for found in report.classes:
        assert found.mean_ece_after < found.mean_ece_before
        assert [position.k for position in found.positions] == [1, 2, 3, 4]
        assert [group.name for group in found.groups] == ["math", "code"]
        assert sum(group.rounds for group in found.groups) == found.rounds
        assert 0.0 < found.mean_ece_noise < min(group.mean_ece_noise for group in found.groups)
    assert report.calibration.block_size == llm.block_size
    assert report.to_json()["positions"][0]["k"] == 1
    assert len(table_rows(report)) == 8
    assert [path.name for path in save_calibration(report, tmp_path)] == [
        "calibration-warm.png",
        "calibration-greedy.png",
    ]


def test_a_task_alone_is_judged_half_by_half(llm: LLM) -> None:
    config = CalibrationConfig(temperatures=(1.0,), max_new_tokens=96)
    (found,) = calibrate(llm, {"math": PROMPTS, "empty": []}, config=config).classes
    assert [group.name for group in found.groups] == ["even", "odd"]


def test_the_error_that_chance_leaves_is_that_of_perfect_confidences() -> None:
    """It falls as rounds become more, and true confidences show no more than it."""
    few, many = (planted(scale=1.0, bias=0.0, num_rounds=num) for num in (400, 6400))
    for rounds in (few, many):
        shown = mean_ece(calibration_by_position(rounds))
        assert shown == pytest.approx(noise_of_ece(rounds), rel=0.5)
    assert noise_of_ece(many) == pytest.approx(noise_of_ece(few) / 4.0, rel=0.3)


def test_what_cannot_be_calibrated_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="two prompts"):
        calibrate(llm, {"one": PROMPTS[:1]}, config=CONFIG)
    with pytest.raises(InputError, match="too few"):
        calibrate(llm, {"one": PROMPTS[:2]}, config=CalibrationConfig(max_new_tokens=8))
    with pytest.raises(InputError, match="at most one"):
        CalibrationConfig(temperatures=(0.8, 1.0))


def test_a_drafter_without_a_confidence_head_is_calibrated_by_its_own_odds(llm: LLM) -> None:
    drafter = llm.drafter
    assert isinstance(drafter, Drafter)
    head, drafter.confidence_head = drafter.confidence_head, None
    try:
        mute = LLM(llm.target, tokenizer=llm.tokenizer, drafter=drafter)
        report = calibrate(mute, TASKS, config=CONFIG)
    finally:
        drafter.confidence_head = head
    for found in report.classes:
        assert found.mean_ece_after < found.mean_ece_before
    scaling = report.calibration.scaling(SamplingClass.GREEDY)
    survival_RK = scaling.survival(np.array([[4.0] * 4, [-4.0] * 4], dtype=np.float32))
    assert (survival_RK[0] >= survival_RK[1]).all()
    assert (np.diff(survival_RK, axis=1) <= 0.0).all()
