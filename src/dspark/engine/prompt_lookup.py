"""Prompt lookup: proposes what followed the same words earlier in the request's own text.

No weights, no taps, no pages. A proposal is certain, not drawn: its distribution is one-hot, and
both couplings stay exact (method section 4).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from dspark.algorithms.ngram_index import NgramIndex
from dspark.core import DraftBlock
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import StepStates
from dspark.errors import InputError
from dspark.kernels.rounds import RoundTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookup:
    """How far back and ahead is looked."""

    block_size: int = 7
    """Tokens proposed in a round, at most."""
    min_match: int = 2
    """Tokens at the end of the text that must have occurred before."""
    max_match: int = 5
    """The longest match that is looked for, first."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InputError(f"block_size is {self.block_size}, but it must be at least 1.")
        NgramIndex(min_length=self.min_match, max_length=self.max_match)


class LookupPass:
    """Prompt lookup for the requests of an engine: a `Proposer`."""

    tap_layers = ()
    num_ahead = 0
    vocabulary = None

    def __init__(self, config: PromptLookup, *, device: torch.device) -> None:
        self.block_size = config.block_size
        self._config = config
        self._device = device
        self._indices: WeakKeyDictionary[LiveRequest, NgramIndex] = WeakKeyDictionary()

    def look(self, requests: Sequence[LiveRequest]) -> Mapping[int, Sequence[float]]:  # noqa: ARG002
        """None: every block is looked up when it is asked for."""
        return {}

    def feed(self, states: StepStates) -> None:
        """Nothing: only committed tokens count."""

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """Nothing is put off."""

    def propose(
        self,
        requests: Sequence[LiveRequest],
        *,
        cache: KVCache,  # noqa: ARG002 (a proposer of its own kind)
        rounds: RoundTable,  # noqa: ARG002
    ) -> DraftBlock:
        """Up to K tokens for each request, none where its last words are new.

        The confidence of the k-th is that of an event seen `match_length + k - 1` times in a row
        and never missed (rule of succession): odds of match_length + k to 1.
        """
        size = self.block_size
        tokens, confidence, offered = [], [], []
        for live in requests:
            found = self._index(live).continuation(size)
            ids = [] if found is None else list(found.token_ids)
            length = 0 if found is None else found.match_length
            offered.append(len(ids))
            tokens.append(ids + [0] * (size - len(ids)))
            confidence.append([math.log(length + 1 + k) for k in range(size)])
        return DraftBlock(
            tokens_RK=torch.tensor(tokens, device=self._device),
            probs_RKS=None,
            confidence_RK=torch.tensor(confidence, device=self._device),
            num_offered=offered,
            is_certain=True,
        )

    def _index(self, live: LiveRequest) -> NgramIndex:
        index = self._indices.get(live)
        if index is None:
            config = self._config
            index = NgramIndex(min_length=config.min_match, max_length=config.max_match)
            self._indices[live] = index
        index.extend(live.tokens[len(index) :])
        return index
