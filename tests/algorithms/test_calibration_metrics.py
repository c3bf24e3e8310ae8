"""Each figure against its definition, written out with loops."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.algorithms.calibration_metrics import (
    ConfidenceRounds,
    auroc,
    brier,
    calibration_by_position,
    ece,
    ece_mass,
    mean_ece,
    reliability,
)
from dspark.core import Origin, RoundResult
from dspark.errors import InputError

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=60)
"""Predictions on a coarse grid, so that ties and bin edges occur."""


def tensors(pairs: Sequence[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    probs = torch.tensor([value / 40 for value, _ in pairs], dtype=torch.float64)
    return probs, torch.tensor([label for _, label in pairs])


@given(PAIRS)
def test_ece_equals_its_definition_over_equal_width_bins(pairs: list[tuple[int, bool]]) -> None:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for value, label in pairs:
        bins.setdefault(min(value * 20 // 40, 19), []).append((value / 40, label))
    expected = sum(
        len(inside)
        / len(pairs)
        * abs(sum(p for p, _ in inside) / len(inside) - sum(y for _, y in inside) / len(inside))
        for inside in bins.values()
    )
    assert ece(*tensors(pairs)) == pytest.approx(expected, abs=1e-12)


def test_ten_records_counted_by_hand_and_none_at_all() -> None:
    """UC-129: 1.0 falls into the last bin, an edge into the bin above it, 0 into the first."""
    probs_N = torch.tensor([0.0, 0.0, 0.1, 0.1, 0.5, 0.5, 0.95, 1.0, 1.0, 1.0], dtype=torch.float64)
    accepted_N = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    # 2 of 10 off by 0.5, 2 by 0.4, 2 by 0, and 4 that say 0.9875 and are right 3 times of 4
    assert ece(probs_N, accepted_N) == pytest.approx(0.1 + 0.08 + 0.0 + 0.4 * 0.2375)
    assert [found.count for found in reliability(probs_N, accepted_N)] == [2, 2, 2, 4]
    for outcome in (True, False):
        same_N = torch.full((10,), outcome)
        assert ece(probs_N, same_N) == pytest.approx(abs(float(outcome) - 0.515))
        assert auroc(probs_N, same_N) is None
    nothing = probs_N[:0], accepted_N[:0]
    rounds = ConfidenceRounds(
        logits_RK=torch.zeros(0, 3),
        verified_R=torch.zeros(0, dtype=torch.int64),
        accepted_R=torch.zeros(0, dtype=torch.int64),
    )
    assert calibration_by_position(rounds) == []
    assert reliability(*nothing) == []
    assert auroc(*nothing) is None


@given(PAIRS)
def test_auroc_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[int, bool]]) -> None:
    accepted = [value for value, label in pairs if label]
    rejected = [value for value, label in pairs if not label]
    found = auroc(*tensors(pairs))
    if not accepted or not rejected:
        assert found is None
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in accepted for b in rejected)
    assert found == pytest.approx(wins / (len(accepted) * len(rejected)), abs=1e-12)


@given(PAIRS)
def test_brier_is_the_mean_squared_distance(pairs: list[tuple[int, bool]]) -> None:
    expected = sum((value / 40 - label) ** 2 for value, label in pairs) / len(pairs)
    assert brier(*tensors(pairs)) == pytest.approx(expected, abs=1e-12)


@given(PAIRS, st.integers(0, 100))
def test_no_figure_depends_on_the_order(pairs: list[tuple[int, bool]], seed: int) -> None:
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    for figure in (ece, ece_mass, auroc, brier):
        assert figure(*tensors(pairs)) == pytest.approx(figure(*tensors(shuffled)), abs=1e-12)


def test_equal_mass_bins_hold_equal_counts_of_distinct_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    probs_N = torch.rand(400, generator=generator, dtype=torch.float64)
    accepted_N = torch.rand(400, generator=generator) < 0.3
    order = probs_N.argsort()
    gaps = [
        abs(float(probs_N[part].mean() - accepted_N[part].double().mean())) * len(part) / 400
        for part in order.split(20)
    ]
    assert ece_mass(probs_N, accepted_N) == pytest.approx(sum(gaps), abs=1e-12)


def test_equal_mass_bins_find_what_a_sparse_wide_bin_averages_away() -> None:
    """Errors of both signs inside one equal-width bin cancel; parted by mass they do not."""
    probs_N = torch.tensor([0.501] * 50 + [0.549] * 50, dtype=torch.float64)
    accepted_N = torch.tensor([True] * 50 + [True] * 2 + [False] * 48)
    assert ece(probs_N, accepted_N) < 0.01
    assert ece_mass(probs_N, accepted_N) > 0.45


def test_a_perfect_forecast_has_no_error_and_a_constant_one_no_rank() -> None:
    sure = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    truth = sure.bool()
    assert (ece(sure, truth), ece_mass(sure, truth), brier(sure, truth)) == (0.0, 0.0, 0.0)
    assert auroc(sure, truth) == 1.0
    assert auroc(torch.full((4,), 0.5, dtype=torch.float64), truth) == 0.5


def test_reliability_shows_the_bins_that_the_ece_weighs() -> None:
    probs_N = torch.tensor([0.02, 0.04, 0.5, 0.97, 1.0], dtype=torch.float64)
    accepted_N = torch.tensor([False, True, True, True, False])
    bins = reliability(probs_N, accepted_N)
    assert [(b.low, b.high, b.count) for b in bins] == [
        (0.0, 0.05, 2),
        (0.5, 0.55, 1),
        (0.95, 1, 2),
    ]
    gap = sum(b.count * abs(b.mean_predicted - b.share_accepted) for b in bins) / 5
    assert gap == pytest.approx(ece(probs_N, accepted_N))


def result(
    logits: Sequence[float] | None, *, planned: int, accepted: int, is_cut: bool = False, **changes
) -> RoundResult:
    count = accepted + (0 if is_cut else 1)
    values = {
        "request_id": "r",
        "token_ids": [7] * count,
        "origins": [Origin.ACCEPTED] * count,
        "logprobs": None,
        "num_offered": 0 if logits is None else len(logits),
        "num_planned": planned,
        "num_accepted": accepted,
        "confidence_logits": logits,
        "is_prefill": False,
        "finish_reason": None,
    }
    return RoundResult(**{**values, **changes})


def test_a_trimmed_position_is_censored_and_never_a_rejection() -> None:
    """UC-147: of three rounds one verified two of its three tokens, one ended in its window."""
    rounds = ConfidenceRounds.of(
        [
            result([0.0, 0.0, 0.0], planned=2, accepted=2),
            result([1.0, 1.0, 1.0], planned=3, accepted=0),
            result([2.0, 2.0, 2.0], planned=3, accepted=1, is_cut=True),
            result(None, planned=0, accepted=0),
            result([9.0, 9.0, 9.0], planned=0, accepted=0, is_prefill=True),
        ]
    )
    assert rounds is not None
    assert rounds.block_size == 3
    half, one, two = (1 / (1 + math.exp(-x)) for x in (0.0, 1.0, 2.0))
    for k, probs, accepted in (
        (1, [half, one, two], [True, False, True]),
        (2, [half**2, one**2], [True, False]),
        (3, [one**3], [False]),
    ):
        found_N, labels_N = rounds.survival_at(k)
        assert found_N.tolist() == pytest.approx(probs, abs=1e-6)
        assert labels_N.tolist() == accepted


def test_positions_are_measured_one_by_one_and_weigh_their_observations() -> None:
    generator = torch.Generator().manual_seed(1)
    rounds = ConfidenceRounds(
        logits_RK=torch.randn(200, 4, generator=generator),
        verified_R=torch.randint(0, 4, (200,), generator=generator),
        accepted_R=torch.zeros(200, dtype=torch.int64),
    )
    positions = calibration_by_position(rounds)
    assert [p.k for p in positions] == [1, 2, 3]  # 4 was never verified
    for found in positions:
        probs_N, accepted_N = rounds.survival_at(found.k)
        assert found.count == len(probs_N) == int((rounds.verified_R >= found.k).sum())
        assert found.ece == ece(probs_N, accepted_N)
        assert found.auroc is None
        assert found.mean_predicted == pytest.approx(float(probs_N.mean()))
    expected = sum(p.ece * p.count for p in positions) / sum(p.count for p in positions)
    assert mean_ece(positions) == pytest.approx(expected)
    assert mean_ece([]) is None


def test_rounds_without_confidence_give_nothing_and_mixed_blocks_are_refused() -> None:
    assert ConfidenceRounds.of([result(None, planned=0, accepted=0)]) is None
    with pytest.raises(InputError, match=r"blocks of \[2, 3\] tokens"):
        ConfidenceRounds.of(
            [
                result([0.0] * 2, planned=2, accepted=0),
                result([0.0] * 3, planned=2, accepted=0),
            ]
        )
