"""A confidence for drafters without a confidence head: how clear their choice at a position is.
It knows a row of scores, not what drew from it.

The margin is the distance of the two best log-probabilities of the distribution that the token of
a position is drawn from. It is known before that token is drawn, so that a plan made from it is
exact (method section 5). A fitted `Scaling` turns it into a chance of acceptance.
"""

import torch
from torch import Tensor

from dspark.algorithms.calibration import Scaling

# Beyond this, the runner-up has no chance that matters; filters make it infinite.
MAX_MARGIN = 40.0


def margins(scores_RV: Tensor) -> Tensor:
    """Best minus second best score of each row, float32 [R], at most `MAX_MARGIN`.

    Any scores that differ from log-probabilities by a constant of the row will do.
    """
    if scores_RV.shape[1] < 2:
        return torch.full((len(scores_RV),), MAX_MARGIN, device=scores_RV.device)
    top_R2 = scores_RV.to(torch.float32).topk(2, dim=1).values
    margin_R = (top_R2[:, 0] - top_R2[:, 1]).clamp(max=MAX_MARGIN)
    # a row that bans everything has no best choice at all
    return torch.nan_to_num(margin_R, nan=0.0)


def uninformed(block_size: int) -> Scaling:
    """What a margin is taken for before anything was observed: 0.8 at every position."""
    return Scaling(scales=(0.0,) * block_size, biases=(1.4,) * block_size)
