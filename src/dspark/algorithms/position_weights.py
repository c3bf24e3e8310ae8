"""How much each slot of a block counts in the loss. It knows no model and no vocabulary.

Letters: R blocks, K block_size, slot k = 1..K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import InputError

_KINDS = ("decay", "dpace", "dpace-acceptance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionWeights:
    """The rule. `decay` is the paper's; the others follow the drafter as it learns."""

    kind: str = "decay"
    """decay: exp(-(k-1)/decay), Eq. 9-11; dpace: from the label's probability; dpace-acceptance:
    from 1 - TV."""
    decay: float = 4.0
    """Of `decay`, in slots; DeepSpec's released configurations have 4."""
    alpha: float = 0.5
    """Of `dpace`: 0 takes the confidences as they are, 1 counts the slots that still follow."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InputError(
                f"Position weights are {self.kind!r}, but must be one of {', '.join(_KINDS)}."
            )
        if not self.decay > 0.0:
            raise InputError(f"The decay is {self.decay!r}, but it must be above 0.")
        if not 0.0 < self.alpha <= 1.0:
            raise InputError(f"The D-PACE alpha is {self.alpha!r}, but it must lie in (0, 1].")

    @property
    def is_fixed(self) -> bool:
        """Whether the weights are known before the drafter runs."""
        return self.kind == "decay"


def decayed(valid_RK: Tensor, *, decay: float) -> Tensor:
    """float32 w_RK = valid * exp(-(k - 1) / decay) (Eq. 9-11)."""
    slot_K = torch.arange(valid_RK.shape[1], dtype=torch.float32, device=valid_RK.device)
    return valid_RK.float() * torch.exp(-slot_K / decay)


def dpace(confidence_RK: Tensor, valid_RK: Tensor, *, alpha: float) -> Tensor:
    """float32 w_RK = sum_{m >= k} prod_{i <= m} c_i, with c_i = (1 - alpha) confidence_i + alpha.

    What the log of confidence k is worth to the expected accepted length: the chance to get
    there times what follows. Detached. D-PACE (arXiv 2605.18810), Eq. 7 and 8.
    """
    smooth_RK = (1.0 - alpha) * confidence_RK.detach().float() + alpha
    reach_RK = torch.where(valid_RK, smooth_RK, 0.0).cumprod(dim=1)
    return reach_RK.flip(1).cumsum(dim=1).flip(1) * valid_RK
