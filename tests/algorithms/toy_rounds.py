"""Rounds whose true chances of acceptance are known."""

from collections.abc import Callable

import numpy as np
import torch

from dspark.algorithms.calibration_metrics import ConfidenceRounds

Chance = Callable[[np.ndarray], np.ndarray]  # logits [N, K] -> P(accepted | those before it are)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def draw(
    chance: Chance, *, num_rounds: int, block_size: int = 5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [N, K] of an eager drafter and how many tokens of each block the target accepts."""
    rng = np.random.default_rng(seed)
    logits_NK = rng.normal(1.2, 1.5, (num_rounds, block_size)).astype(np.float32)
    is_accepted_NK = rng.random(logits_NK.shape) < chance(logits_NK)
    return logits_NK, np.cumprod(is_accepted_NK, axis=1).sum(1)


def in_full(logits_NK: np.ndarray, accepted_N: np.ndarray) -> ConfidenceRounds:
    return ConfidenceRounds(
        logits_RK=torch.from_numpy(logits_NK),
        verified_R=torch.full((len(logits_NK),), logits_NK.shape[1]),
        accepted_R=torch.from_numpy(accepted_N),
    )


def rescaled(logits_NK: np.ndarray, survival_NK: np.ndarray) -> np.ndarray:
    """Logits whose product of sigmoids is this survival: what the metrics take."""
    before_NK = np.concatenate([np.ones((len(logits_NK), 1)), survival_NK[:, :-1]], axis=1)
    ratio_NK = np.clip(survival_NK / before_NK, 1e-6, 1 - 1e-6)
    return np.log(ratio_NK / (1 - ratio_NK)).astype(np.float32)
