"""Calibration from trimmed rounds: a planted shift, an oracle that saw everything, a naive fit."""

import numpy as np
import pytest
import torch

from dspark.algorithms.calibration import Scaling
from dspark.algorithms.calibration_metrics import calibration_by_position, mean_ece
from dspark.algorithms.confidence import log_odds_of_best
from dspark.algorithms.online_calibration import (
    Window,
    find_drift,
    fit_logistic,
    next_explored,
    refit,
)
from dspark.errors import InputError
from tests.algorithms.toy_rounds import draw, in_full, rescaled, sigmoid

K = 5
SHARE = 0.05


def explored_of(seed: int, num_rounds: int, share: float) -> np.ndarray:
    """Which of a request's rounds are explored."""
    explored_N, at = np.zeros(num_rounds, dtype=bool), next_explored(seed, 0, share)
    while at < num_rounds:
        explored_N[at] = True
        at = next_explored(seed, at + 1, share)
    return explored_N


def serve(
    chance, scaling: Scaling, *, num_rounds: int, seed: int, window: Window, refit_every: int = 500
) -> tuple[Scaling, Window, dict[str, np.ndarray]]:
    """Rounds verified while the calibrated survival is above 0.35, or in full to explore."""
    logits_NK, all_accepted_N = draw(chance, num_rounds=num_rounds, block_size=K, seed=seed)
    explored_N = explored_of(seed, num_rounds, window.share)
    verified_N = np.zeros(num_rounds, dtype=np.int64)
    for start in range(0, num_rounds, refit_every):
        part = slice(start, start + refit_every)
        planned_N = (scaling.survival(logits_NK[part]) >= 0.35).sum(1)
        verified_N[part] = np.where(explored_N[part], K, planned_N)
        window = window.extended(
            logits_NK[part],
            planned=planned_N,
            verified=verified_N[part],
            accepted=np.minimum(all_accepted_N[part], verified_N[part]),
        )
        scaling = refit(window, Scaling.identity(K))
    seen = {"logits": logits_NK, "verified": verified_N, "accepted": all_accepted_N}
    return scaling, window, seen


def fit_on(logits_NK, accepted_N) -> Scaling:
    """The same fit on rounds all of which count as verified in full."""
    everything = np.full(len(logits_NK), K)
    window = Window.empty(K, share=SHARE, size=len(logits_NK)).extended(
        logits_NK, planned=everything, verified=everything, accepted=accepted_N
    )
    return refit(window, Scaling.identity(K))


@pytest.mark.parametrize(
    "shifted",
    [lambda z: sigmoid(z / 2.2), lambda z: sigmoid(0.6 * z - 0.6)],
    ids=["overconfident", "overconfident and biased"],
)
def test_after_a_shift_trimmed_rounds_lead_to_what_an_oracle_finds(shifted):
    """The oracle sees the outcome of every position; the naive fit takes trimmed for rejected."""
    window = Window.empty(K, share=SHARE)
    scaling, window, _ = serve(
        sigmoid, Scaling.identity(K), num_rounds=4_000, seed=1, window=window
    )
    assert max(abs(scale - 1.0) for scale in scaling.scales) < 0.2
    scaling, window, seen = serve(shifted, scaling, num_rounds=10_000, seed=2, window=window)

    recent = slice(-window.size, None)
    logits_NK, accepted_N = seen["logits"][recent], seen["accepted"][recent]
    verified_N = seen["verified"][recent]
    assert (verified_N < K).mean() > 0.3  # trimming is the rule, not the exception
    oracle = fit_on(logits_NK, accepted_N)
    naive = fit_on(logits_NK, np.minimum(accepted_N, verified_N))

    fresh_NK, fresh_N = draw(shifted, num_rounds=20_000, block_size=K, seed=9)
    truth_NK = np.cumprod(shifted(fresh_NK), axis=1)

    def error(found: Scaling) -> float | None:
        scaled_NK = rescaled(fresh_NK, found.survival(fresh_NK))
        return mean_ece(calibration_by_position(in_full(scaled_NK, fresh_N)))

    def distance(found: Scaling, wanted_NK) -> float:
        return float(np.abs(found.survival(fresh_NK) - wanted_NK).mean())

    assert error(scaling) < error(oracle) + 0.01
    assert error(naive) > error(oracle) + 0.03
    assert distance(scaling, oracle.survival(fresh_NK)) < 0.015
    assert distance(naive, oracle.survival(fresh_NK)) > 0.02
    assert distance(Scaling.identity(K), truth_NK) > 0.08


def test_a_shift_is_reported_as_drift_until_the_fit_has_followed():
    window = Window.empty(K, share=SHARE, size=2_000)
    scaling, window, _ = serve(
        sigmoid, Scaling.identity(K), num_rounds=2_000, seed=1, window=window
    )
    assert not any(position.is_drift for position in find_drift(window, scaling))

    def shifted(z):
        return sigmoid(z / 3)

    followed, window, _ = serve(shifted, scaling, num_rounds=2_000, seed=2, window=window)
    before, after = find_drift(window, scaling), find_drift(window, followed)
    assert before[0].is_drift
    assert before[0].predicted > before[0].observed + 0.05
    assert before[0].num_observed > 1_500
    assert not any(position.is_drift for position in after)


def test_old_rounds_fade_and_then_are_forgotten():
    logits_NK, accepted_N = draw(lambda z: sigmoid(z - 2), num_rounds=1_000, block_size=K)
    newer_NK, newer_N = draw(lambda z: sigmoid(z + 1), num_rounds=1_000, block_size=K, seed=4)
    everything = np.full(1_000, K)
    whole = (
        Window.empty(K, share=SHARE)
        .extended(logits_NK, planned=everything, verified=everything, accepted=accepted_N)
        .extended(newer_NK, planned=everything, verified=everything, accepted=newer_N)
    )
    mixed = refit(whole, Scaling.identity(K)).biases[0]
    faded = refit(whole, Scaling.identity(K), half_life=100).biases[0]
    assert -1.0 < mixed < 0.7
    assert faded == pytest.approx(1.0, abs=0.4)
    short = Window.empty(K, share=SHARE, size=1_000).extended(
        np.concatenate([logits_NK, newer_NK]),
        planned=np.full(2_000, K),
        verified=np.full(2_000, K),
        accepted=np.concatenate([accepted_N, newer_N]),
    )
    assert len(short.logits_NK) == 1_000
    assert refit(short, Scaling.identity(K)).biases[0] == pytest.approx(1.0, abs=0.3)


def test_without_observations_the_scaling_in_force_stays():
    scaling = Scaling(scales=(0.5, 0.7), biases=(0.1, -0.2))
    found = refit(Window.empty(2, share=SHARE), scaling)
    assert found.scales == pytest.approx(scaling.scales)
    assert found.biases == pytest.approx(scaling.biases)


def test_one_outcome_only_gives_finite_numbers():
    """UC-129's degenerate sets: all accepted, all rejected."""
    logits_N = np.linspace(-3, 3, 500)
    for outcome in (True, False):
        scale, bias = fit_logistic(logits_N, np.full(500, outcome), np.ones(500), prior=(1.0, 0.0))
        assert np.isfinite([scale, bias]).all()
        assert scale >= 0.0
        assert (bias > 1.0) == outcome


def test_confidences_that_point_the_wrong_way_count_for_nothing():
    logits_N = np.repeat([-2.0, 2.0], 500)
    is_accepted_N = logits_N < 0
    scale, bias = fit_logistic(logits_N, is_accepted_N, np.ones(1000), prior=(1.0, 0.0))
    assert scale == 0.0
    assert sigmoid(bias) == pytest.approx(0.5, abs=0.01)


def test_a_drafter_without_a_head_learns_from_the_odds_of_its_likeliest_tokens():
    """From taking them for the truth to the accepted share as a function of them."""
    generator = torch.Generator().manual_seed(0)
    scores_RV = 2.0 * torch.randn(K * 6_000, 16, generator=generator)
    logits_NK = log_odds_of_best(scores_RV).view(6_000, K).numpy()
    rng = np.random.default_rng(2)
    chance_NK = sigmoid(0.8 * logits_NK - 0.5)
    accepted_N = np.cumprod(rng.random(logits_NK.shape) < chance_NK, axis=1).sum(1)
    everything = np.full(6_000, K)
    window = Window.empty(K, share=SHARE, size=6_000).extended(
        logits_NK, planned=everything, verified=everything, accepted=accepted_N
    )
    found = refit(window, Scaling.identity(K))
    error = np.abs(found.survival(logits_NK) - np.cumprod(chance_NK, axis=1)).mean()
    assert error < 0.02


def test_exploration_is_rare_and_a_function_of_seed_and_round():
    drawn = explored_of(5, 20_000, 0.04)
    assert drawn.mean() == pytest.approx(0.04, abs=0.006)
    follows = drawn[1:][drawn[:-1]].mean()  # a round behind an explored one is like any other
    assert follows == pytest.approx(0.04, abs=0.025)
    assert explored_of(5, 50, 0.04).tolist() == drawn[:50].tolist()
    assert explored_of(6, 20_000, 0.04).tolist() != drawn.tolist()


@pytest.mark.parametrize("share", [0.0, 0.2, -0.1])
def test_exploration_is_bounded(share: float):
    with pytest.raises(InputError, match="share"):
        Window.empty(K, share=share)
