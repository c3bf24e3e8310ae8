"""Small distributions and statistics shared by the tests of `dspark.algorithms`."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def chi_square_p_value(observed: Tensor, expected: Tensor) -> float:
    """Probability of counts at least this far from `expected`; cells under 5 are pooled."""
    observed, expected = observed.double().flatten(), expected.double().flatten()
    small = expected < 5
    if small.any():
        pooled = torch.stack([observed[small].sum(), expected[small].sum()])
        observed = torch.cat([observed[~small], pooled[:1]])
        expected = torch.cat([expected[~small], pooled[1:]])
    if expected[-1] == 0:
        if observed[-1] > 0:
            return 0.0
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def toy_logits(prefix: Sequence[int], *, vocab_size: int, salt: int) -> Tensor:
    """Logits of a toy model: any function of the whole prefix will do, if it is always the same."""
    code = salt
    for token in prefix:
        code = (code * 1_000_003 + token + 1) % 2**31
    generator = torch.Generator().manual_seed(code)
    return 1.5 * torch.randn(vocab_size, generator=generator)


def shared_noise_joint(p_V: Tensor, q_V: Tensor) -> Tensor:
    """P(draft = i, target = j) when i = argmax(log q + g), j = argmax(log p + g), exactly.

    With e_k = exp(-g_k) standard exponential, i minimises e/q and j minimises e/p. On the
    diagonal P = 1 / sum_k max(p_k/p_i, q_k/q_i). Off it, given e_i = a and e_j = t a with
    q_j/q_i <= t <= p_j/p_i, every other e_k must exceed a max(q_k/q_i, t p_k/p_j): integrating
    a out leaves the integral over t of 1 / (1 + t + sum_k max(...))^2, whose pieces are closed.
    """
    p, q = p_V.double().tolist(), q_V.double().tolist()
    joint = torch.zeros(len(p), len(q), dtype=torch.float64)
    for i in range(len(p)):
        for j in range(len(p)):
            if q[i] == 0 or p[j] == 0:
                continue
            if i == j:
                joint[i, j] = 1 / sum(
                    max(p_k / p[i], q_k / q[i]) for p_k, q_k in zip(p, q, strict=True)
                )
            else:
                joint[i, j] = _off_diagonal(p, q, i, j)
    return joint


def _off_diagonal(p: list[float], q: list[float], i: int, j: int) -> float:
    low = q[j] / q[i]
    # A token i that the target cannot emit leaves t without an upper end.
    high = p[j] / p[i] if p[i] > 0 else math.inf
    if low >= high:
        return 0.0
    others = [k for k in range(len(p)) if k not in (i, j)]
    kinks = {q[k] / q[i] * p[j] / p[k] for k in others if p[k] > 0}
    edges = [low, *sorted(kink for kink in kinks if low < kink < high), high]
    total = 0.0
    for left, right in pairwise(edges):
        middle = left + 1.0 if right == math.inf else (left + right) / 2
        constant, slope = 1.0, 1.0
        for k in others:
            if q[k] / q[i] >= middle * p[k] / p[j]:
                constant += q[k] / q[i]
            else:
                slope += p[k] / p[j]
        if right == math.inf:
            total += 1 / (slope * (constant + slope * left))
        else:
            total += (right - left) / ((constant + slope * left) * (constant + slope * right))
    return total
