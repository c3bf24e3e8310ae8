"""A grammar along one answer: what may follow the committed tokens and any tokens drafted behind.

It knows no logits. Drafter and verification ask for the same places in turn, so masks are kept
until the round is over.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.core import GrammarMatcher

_MINUS_INFINITY = -(1 << 23)
"""The int32 with the bits of the float32 -inf."""


class GrammarCursor:
    """A matcher that stands behind the committed answer, or ahead of it along drafted tokens."""

    def __init__(self, matcher: GrammarMatcher, *, device: torch.device | None = None) -> None:
        self._matcher = matcher
        self._device = device
        self._ahead: list[int] = []
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens belong to the answer now; what stands behind its end is passed over."""
        self._move_to(token_ids)
        self._ahead.clear()
        self._masks.clear()

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Leading tokens that may follow the answer, up to the one that ends it."""
        return self._move_to(token_ids)

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many of these tokens, drawn under the masks, lead to the end of the grammar."""
        num_allowed = self._move_to(token_ids)
        if self._matcher.is_finished:
            return num_allowed
        assert num_allowed == len(token_ids), "a forbidden token was drawn"
        return None

    def bans(self, drafted: Sequence[int]) -> Tensor | None:
        """What is added to scores behind the answer and `drafted`: float32 [V], 0 for tokens that
        may follow, -inf for all others.

        `None` where no token of the answer can stand: behind its end, or behind a drafted token
        that is forbidden itself. Such a row must not look impossible: nothing is drawn from it.
        """
        place = tuple(drafted)
        if place not in self._masks:
            is_possible = self._move_to(drafted) == len(drafted) and not self._matcher.is_finished
            self._masks[place] = self._mask() if is_possible else None
        return self._masks[place]

    def _mask(self) -> Tensor:
        # by the bits of -inf: no branch for each token, and a sum later instead of a masked fill
        bans_V = (
            (~self._matcher.allowed()).to(torch.int32).mul_(_MINUS_INFINITY).view(torch.float32)
        )
        return bans_V if self._device is None else bans_V.to(self._device)

    def _move_to(self, token_ids: Sequence[int]) -> int:
        """Stand behind as many of these tokens as are allowed; their number."""
        common = 0
        for held, token in zip(self._ahead, token_ids, strict=False):
            if held != token:
                break
            common += 1
        if common < len(self._ahead):
            self._matcher.roll_back(len(self._ahead) - common)
            del self._ahead[common:]
        for token in token_ids[common:]:
            if self._matcher.is_finished or not self._matcher.accept(token):
                break
            self._ahead.append(token)
        return len(self._ahead)
