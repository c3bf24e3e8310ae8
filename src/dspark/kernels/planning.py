"""The search of a plan over the block of many requests, as operators without the cost of calls.

On the same survivals they find the lengths of `algorithms.prefix_scheduler`, ties included; that is
their reference, and runs where they do not. Arrays come in and go out: a planner knows no tensor.
Letters: R requests, K positions, B budgets 0, 1, ..
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.algorithms.calibration import Logits, scaled_survival
from dspark.algorithms.prefix_scheduler import free_gain, priced
from dspark.algorithms.ranking import Floats, Ints, Survivals
from dspark.kernels import extension


def survivals(logits_RK: Logits, scale: Logits, bias: Logits) -> Survivals:
    """`calibration.scaled_survival` but for the last bits of exponentials: float32 [R, K].

    `scale` and `bias`: float32 [K], or [R, K] where requests differ.
    """
    if not _has_operators() or logits_RK.dtype != np.float32:
        return scaled_survival(logits_RK, scale, bias)
    found_RK: Survivals = torch.ops.dspark.survivals.default(
        torch.from_numpy(logits_RK), torch.from_numpy(scale), torch.from_numpy(bias)
    ).numpy()
    return found_RK


def best_prefixes(
    survival_RK: Survivals, caps: Sequence[int], *, seconds_B: Floats, worth: float
) -> list[int]:
    """`prefix_scheduler.free_gain`: lengths that gain most at the `worth` of a second in tokens.

    `caps`: drafted tokens of each request that may be verified, 255 at most.
    """
    if not _has_fast_path(survival_RK):
        lengths_R = free_gain(survival_RK, _array(caps), seconds_B=seconds_B, worth=worth)
        return _numbers(lengths_R)
    found: list[int] = torch.ops.dspark.best_prefixes.default(
        torch.from_numpy(survival_RK), _bytes(caps), torch.from_numpy(seconds_B), worth
    )
    return found


def priced_prefixes(
    survival_RK: Survivals, caps: Sequence[int], *, price: float, most: int
) -> list[int]:
    """`prefix_scheduler.priced`: lengths of the tokens that survive with a chance above `price`,
    the best `most` of them. `caps` as in `best_prefixes`."""
    if not _has_fast_path(survival_RK):
        return _numbers(priced(survival_RK, _array(caps), price=price, most=most))
    found: list[int] = torch.ops.dspark.priced_prefixes.default(
        torch.from_numpy(survival_RK), _bytes(caps), price, most
    )
    return found


def _has_fast_path(survival_RK: Survivals) -> bool:
    return _has_operators() and survival_RK.dtype == np.float32 and survival_RK.flags.c_contiguous


def _has_operators() -> bool:
    """A library that was built before these were written has others."""
    return extension.IS_LOADED and hasattr(torch.ops.dspark, "best_prefixes")


# out of a list of numbers both would take four times as long
def _bytes(caps: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(caps), dtype=torch.uint8)


def _array(caps: Sequence[int]) -> Ints:
    return np.array(bytearray(caps), dtype=np.int64)


def _numbers(lengths_R: Ints) -> list[int]:
    found: list[int] = lengths_R.tolist()
    return found
