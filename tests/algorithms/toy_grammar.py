"""Grammars as automata, small enough to enumerate."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ToyGrammar:
    """`moves[state][token]` is the next state; state 0 is the start, a move to `END` ends it."""

    moves: Mapping[int, Mapping[int, int]]
    vocab_size: int

    END = 99

    def matcher(self) -> "ToyMatcher":
        return ToyMatcher(self)


class ToyMatcher:
    def __init__(self, grammar: ToyGrammar) -> None:
        self.grammar = grammar
        self.states = [0]

    @property
    def is_finished(self) -> bool:
        return self.states[-1] == ToyGrammar.END

    def allowed(self) -> Tensor:
        assert not self.is_finished
        mask_V = torch.zeros(self.grammar.vocab_size, dtype=torch.bool)
        mask_V[list(self.grammar.moves[self.states[-1]])] = True
        return mask_V

    def accept(self, token_id: int) -> bool:
        assert not self.is_finished, "a token was fed to a finished grammar"
        state = self.grammar.moves[self.states[-1]].get(token_id)
        if state is not None:
            self.states.append(state)
        return state is not None

    def roll_back(self, num_tokens: int) -> None:
        assert 0 < num_tokens < len(self.states)
        del self.states[-num_tokens:]


def pairs_then_end(a: int, b: int, c: int, eos: int, *, vocab_size: int) -> ToyGrammar:
    """(ab)*c, then EOS."""
    moves = {0: {a: 1, c: 2}, 1: {b: 0}, 2: {eos: ToyGrammar.END}}
    return ToyGrammar(moves, vocab_size)
