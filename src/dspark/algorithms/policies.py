"""Baseline policies beside the prefix scheduler, so that comparisons run in the same place.
They know confidences and how many requests there are, nothing of what a step costs.

    plain             FixedWidth(width=0)
    fixed k           FixedWidth(width=k)
    MTP-1             FixedWidth(width=1)
    threshold         ConfidenceThreshold: the longest prefix of confident tokens
    batch-size table  BatchSizeTable: a width for every number of requests (SmartSpec, vLLM's DSD)

All are exact under every coupling: a length depends on confidences up to its own position, and
the confidence of a position is known before its token.
Letters: R requests, K positions.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Ints
from dspark.errors import InputError

Confidences = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWidth:
    """The same number of drafted tokens of every request."""

    width: int

    def __post_init__(self) -> None:
        _require_width(self.width)

    def widest(self, _num_requests: int) -> int:
        """Drafted tokens worth having for each request; 0 drafts nothing."""
        return self.width

    def lengths(self, _confidence_RK: Confidences | None, caps_R: Ints) -> Ints:
        """Drafted tokens to verify: [R]."""
        return np.minimum(self.width, caps_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceThreshold:
    """Tokens up to the first one whose confidence, given those before it, is below a threshold."""

    threshold: float
    width: int

    def __post_init__(self) -> None:
        _require_width(self.width)
        if not 0.0 <= self.threshold <= 1.0:
            raise InputError(f"threshold is {self.threshold!r}, but it must lie in [0, 1].")

    def widest(self, _num_requests: int) -> int:
        """Drafted tokens worth having for each request."""
        return self.width

    def lengths(self, confidence_RK: Confidences | None, caps_R: Ints) -> Ints:
        """Drafted tokens to verify: [R]; all that the caps allow without confidences."""
        widest_R = np.minimum(self.width, caps_R)
        if confidence_RK is None:
            return widest_R
        is_sure_RK = confidence_RK >= self.threshold
        num_sure_R: Ints = np.logical_and.accumulate(is_sure_RK, axis=1).sum(1)
        return np.minimum(num_sure_R, widest_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeTable:
    """`widths[i]` for up to `up_to[i]` requests, and nothing drafted beyond the last."""

    up_to: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.up_to) != len(self.widths) or list(self.up_to) != sorted(set(self.up_to)):
            raise InputError(
                f"up_to is {self.up_to} and widths is {self.widths}, but the numbers of requests "
                "must rise and have one width each."
            )
        for width in self.widths:
            _require_width(width)

    def widest(self, num_requests: int) -> int:
        """Drafted tokens worth having for each request."""
        for most, width in zip(self.up_to, self.widths, strict=True):
            if num_requests <= most:
                return width
        return 0

    def lengths(self, _confidence_RK: Confidences | None, caps_R: Ints) -> Ints:
        """Drafted tokens to verify: [R]."""
        return np.minimum(self.widest(len(caps_R)), caps_R)


Policy = FixedWidth | ConfidenceThreshold | BatchSizeTable


def _require_width(width: int) -> None:
    if width < 0:
        raise InputError(f"width is {width}, but it must be at least 0.")
