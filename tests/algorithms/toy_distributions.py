"""Small distributions and statistics shared by the tests of `dspark.algorithms`."""

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
