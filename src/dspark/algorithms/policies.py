"""Policies by name: the prefix scheduler's own, and the baselines that it is compared with.
They know confidences and how many requests there are, nothing of what a step costs.

    auto              Adaptive: the prefix scheduler; auto:causal, auto:delayed, auto:free and
                      auto:priced name the search, which is otherwise the best one that is exact in
                      a step
    none              FixedWidth(width=0): plain decoding
    fixed, fixed:K    FixedWidth: the whole block, or K tokens of it
    mtp1              FixedWidth(width=1)
    threshold:X[:K]   ConfidenceThreshold: the longest prefix of confident tokens
    table:R=K,R=K     BatchSizeTable: a width for every number of requests (SmartSpec, vLLM's DSD)

The baselines are exact under every coupling: a length depends on confidences up to its own
position, and the confidence of a position is known before its token.
Letters: R requests, K positions.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Ints
from dspark.errors import InputError

Confidences = npt.NDArray[np.float32]

WHOLE_BLOCK = 256
"""A width that no block exceeds."""


class Search(StrEnum):
    """How a budget is searched (`prefix_scheduler`)."""

    CAUSAL = "causal"
    DELAYED = "delayed"
    FREE = "free"
    PRICED = "priced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """The prefix scheduler: what is verified follows confidences, load and measured costs."""

    search: Search | None = None
    """`None`: free where the text does not depend on it, else priced. Free asks for that in every
    step; others are exact in all."""
    share: float = 0.02
    """Rounds that are verified in full, whatever they cost, so that calibration sees all; fewer of
    each request where there are many."""
    margin: float = 0.02
    """Predicted gain below which drafting is not switched on or off, nor a budget changed."""


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


Baseline = FixedWidth | ConfidenceThreshold | BatchSizeTable
Policy = Adaptive | Baseline


def parse_policy(text: str) -> Policy:
    """The policy of a name (see the top). Raises `InputError` for any other text."""
    name, _, rest = text.partition(":")
    fixed: dict[str, Policy] = {
        "none": FixedWidth(width=0),
        "mtp1": FixedWidth(width=1),
        "auto": Adaptive(),
    }
    try:
        if not rest and name in fixed:
            return fixed[name]
        match name, rest.split(":"):
            case "auto", [search]:
                return Adaptive(search=Search(search))
            case "fixed", [width]:
                return FixedWidth(width=int(width) if width else WHOLE_BLOCK)
            case "threshold", [threshold]:
                return ConfidenceThreshold(threshold=float(threshold), width=WHOLE_BLOCK)
            case "threshold", [threshold, width]:
                return ConfidenceThreshold(threshold=float(threshold), width=int(width))
            case "table", [table]:
                return _table_of(table)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
    raise InputError(
        f"policy is {text!r}, but it must be auto, none, fixed, fixed:K, mtp1, threshold:X or "
        "table:R=K,R=K with numbers X in [0, 1], R and K."
    )


def _table_of(text: str) -> BatchSizeTable:
    pairs = [pair.split("=") for pair in text.split(",")]
    return BatchSizeTable(
        up_to=tuple(int(requests) for requests, _ in pairs),
        widths=tuple(int(width) for _, width in pairs),
    )


def _require_width(width: int) -> None:
    if width < 0:
        raise InputError(f"width is {width}, but it must be at least 0.")
