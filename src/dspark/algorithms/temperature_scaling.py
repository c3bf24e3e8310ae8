"""Sequential temperature scaling (Section 3.2.1): one temperature for each position.
It knows rounds and what their verification showed; it does not collect them.

Left to right, T_k is the value of a log-spaced grid that minimises the expected calibration error
of the survival a_k, with T_1 .. T_{k-1} as they were found. Ties go to the value nearest to 1.
Letters: N rounds, K positions, G temperatures of the grid.
"""

from dataclasses import dataclass

import numpy as np

from dspark.algorithms.calibration import Scaling
from dspark.algorithms.calibration_metrics import NUM_BINS, ConfidenceRounds
from dspark.algorithms.ranking import Floats

GRID = np.exp(np.linspace(np.log(1 / 8), np.log(8), 97))
MIN_ROUNDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTemperatures:
    """Temperatures by position, and how many rounds each one rests on."""

    temperatures: tuple[float, ...]
    num_rounds: tuple[int, ...]
    """Positions with fewer than `MIN_ROUNDS` keep the temperature 1 (UC-131)."""

    @property
    def scaling(self) -> Scaling:
        """What is applied."""
        return Scaling.of_temperatures(self.temperatures)


def fit_temperatures(rounds: ConfidenceRounds, *, grid: Floats = GRID) -> FittedTemperatures:
    """The fit over rounds that were verified in full.

    A position counts in the rounds that verified it, whether or not an earlier one was rejected;
    unverified positions are no rejections. Where trimming decided what was verified, the rounds
    that verified deep are the confident ones, and the fit is theirs alone: see
    `online_calibration` for rounds like that.
    """
    logits_NK = rounds.logits_RK.double().numpy()
    verified_N, accepted_N = rounds.verified_R.numpy(), rounds.accepted_R.numpy()
    survival_N = np.ones(len(logits_NK))
    temperatures, counts = [], []
    for k in range(rounds.block_size):
        seen_N = verified_N > k
        counts.append(int(seen_N.sum()))
        temperature = 1.0
        if counts[-1] >= MIN_ROUNDS:
            survival_GN = survival_N[seen_N] * _sigmoid(logits_NK[seen_N, k] / grid[:, None])
            errors_G = _calibration_errors(survival_GN, accepted_N[seen_N] > k)
            best_G = np.flatnonzero(errors_G <= errors_G.min())
            temperature = float(grid[best_G[np.abs(np.log(grid[best_G])).argmin()]])
        temperatures.append(temperature)
        survival_N = survival_N * _sigmoid(logits_NK[:, k] / temperature)
    return FittedTemperatures(temperatures=tuple(temperatures), num_rounds=tuple(counts))


def _calibration_errors(survival_GN: Floats, is_accepted_N: np.ndarray) -> Floats:
    """ECE over equal-width bins for every temperature at once: [G]."""
    num_grid, num_rounds = survival_GN.shape
    bins_GN = np.minimum((survival_GN * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    bins_GN += NUM_BINS * np.arange(num_grid)[:, None]
    gaps_GB = np.bincount(
        bins_GN.ravel(),
        weights=(survival_GN - is_accepted_N).ravel(),
        minlength=NUM_BINS * num_grid,
    ).reshape(num_grid, NUM_BINS)
    errors_G: Floats = np.abs(gaps_GB).sum(1) / num_rounds
    return errors_G


def _sigmoid(logits: Floats) -> Floats:
    # logits are clipped where the sigmoid is 0 or 1 to the last bit anyway
    values: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -700.0, 700.0)))
    return values
