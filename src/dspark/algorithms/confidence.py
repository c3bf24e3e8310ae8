"""A confidence for drafters without a confidence head: how clear their choice at a position is.
It knows a row of logits, not what is drawn from it.

The row is known before its token is drawn, so that a plan made from it is exact (method section
5). A fitted `Scaling` turns it into a chance of acceptance, as it does with a head's logit.
"""

from torch import Tensor

from dspark.algorithms.calibration import Calibration, SamplingClass, Scaling

_LEAST_OTHERS = 1e-6
"""Beside the likeliest token; less is lost in the sum's own rounding."""


def log_odds_of_best(logits_RS: Tensor) -> Tensor:
    """log(q / (1 - q)) of the likeliest token at temperature 1, float32 [R], at most 13.8."""
    shifted_RS = logits_RS.float()
    shifted_RS = shifted_RS - shifted_RS.amax(dim=-1, keepdim=True)
    return -(shifted_RS.exp().sum(dim=-1) - 1.0).clamp(min=_LEAST_OTHERS).log()


def uninformed(block_size: int) -> Calibration:
    """Of blocks that come without any confidence: 0.8 at every position."""
    scaling = Scaling(scales=(0.0,) * block_size, biases=(1.4,) * block_size)
    return Calibration(scalings={SamplingClass.WARM: scaling})
