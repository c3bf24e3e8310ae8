"""A threshold replayed round by round, beside a loop over the rounds."""

from itertools import pairwise

import pytest
import torch

from dspark.algorithms.calibration_metrics import ConfidenceRounds
from dspark.algorithms.threshold_sweep import sweep


def random_rounds(count: int = 300) -> ConfidenceRounds:
    generator = torch.Generator().manual_seed(0)
    return ConfidenceRounds(
        logits_RK=2.0 * torch.randn(count, 4, generator=generator),
        verified_R=torch.randint(3, 5, (count,), generator=generator),
        accepted_R=torch.randint(0, 4, (count,), generator=generator),
    )


def test_each_threshold_equals_a_loop_over_the_whole_rounds() -> None:
    rounds = random_rounds()
    for point in sweep(rounds):
        planned = accepted = count = 0
        for logits_K, verified, kept in zip(
            rounds.logits_RK, rounds.verified_R.tolist(), rounds.accepted_R.tolist(), strict=True
        ):
            if verified < 4:
                continue
            width = 0
            for c in logits_K.sigmoid():
                if c < point.threshold:
                    break
                width += 1
            count, planned, accepted = count + 1, planned + width, accepted + min(width, kept)
        assert point.planned_per_round == pytest.approx(planned / count)
        assert point.accepted_per_round == pytest.approx(accepted / count)
        assert point.tau == pytest.approx(1 + accepted / count)
        assert point.acceptance_planned == (pytest.approx(accepted / planned) if planned else None)


def test_zero_keeps_everything_and_above_one_nothing() -> None:
    rounds = random_rounds()
    whole_R = rounds.verified_R == 4
    everything, nothing = sweep(rounds, thresholds=(0.0, 1.01))
    assert everything.planned_per_round == 4.0
    assert everything.tau == pytest.approx(1 + float(rounds.accepted_R[whole_R].double().mean()))
    assert (nothing.tau, nothing.planned_per_round) == (1.0, 0.0)
    assert nothing.acceptance_planned is None


def test_a_higher_threshold_plans_and_accepts_no_more() -> None:
    points = sweep(random_rounds())
    for low, high in pairwise(points):
        assert high.planned_per_round <= low.planned_per_round
        assert high.accepted_per_round <= low.accepted_per_round


def test_without_a_whole_round_there_is_no_point() -> None:
    rounds = ConfidenceRounds(
        logits_RK=torch.zeros(2, 4),
        verified_R=torch.tensor([3, 0]),
        accepted_R=torch.tensor([3, 0]),
    )
    assert sweep(rounds) == []
