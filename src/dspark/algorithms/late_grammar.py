"""A grammar that begins in the middle of an answer: behind the words of a model that thinks first.

It knows tokens and another grammar, no logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.core import Grammar, GrammarMatcher
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class LateGrammar:
    """Any tokens up to a marker, then `grammar`: a `Grammar`.

    The answer cannot end before the marker: `end_ids` are the tokens that would end it.
    """

    grammar: Grammar
    marker: Sequence[int]
    """Tokens that end the free part, such as those of a closing tag."""
    end_ids: Sequence[int]

    def __post_init__(self) -> None:
        if not self.marker:
            raise InputError("The marker of a late grammar is empty; use the grammar itself.")

    @property
    def vocab_size(self) -> int:
        """V of the masks."""
        return self.grammar.vocab_size

    def matcher(self) -> GrammarMatcher:
        """For a new answer."""
        return _LateMatcher(self)


class _LateMatcher:
    def __init__(self, late: LateGrammar) -> None:
        self._inner = late.grammar.matcher()
        self._marker = list(late.marker)
        self._end_ids = frozenset(late.end_ids)
        self._free_V = torch.ones(late.vocab_size, dtype=torch.bool)
        self._free_V[list(late.end_ids)] = False
        self._free: list[int] = []
        self._num_inner = 0

    @property
    def is_finished(self) -> bool:
        return self._has_begun and self._inner.is_finished

    def allowed(self) -> Tensor:
        return self._inner.allowed() if self._has_begun else self._free_V

    def accept(self, token_id: int) -> bool:
        if self._has_begun:
            is_accepted = self._inner.accept(token_id)
            self._num_inner += is_accepted
            return is_accepted
        if token_id in self._end_ids or not 0 <= token_id < len(self._free_V):
            return False
        self._free.append(token_id)
        return True

    def roll_back(self, num_tokens: int) -> None:
        num_inner = min(num_tokens, self._num_inner)
        if num_inner:
            self._inner.roll_back(num_inner)
            self._num_inner -= num_inner
        if num_tokens > num_inner:
            del self._free[num_inner - num_tokens :]

    @property
    def _has_begun(self) -> bool:
        # nothing is added to the free tokens behind the first marker
        return self._free[-len(self._marker) :] == self._marker
