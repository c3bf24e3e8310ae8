"""Beside a drafter: copies of what followed the same words earlier in a request's own text.

Answers repeat themselves and their prompts: code that is edited, figures that are quoted, a greedy
answer that goes in circles. A copy costs no drafter and is right more often there. Each round of a
request is drafted or copied, by what both promise from what came before: the text and earlier
blocks, never the block itself, so both couplings stay exact (method section 4). A copied token has
probability 1: q is one-hot.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark.algorithms.copy_odds import CopyOdds, num_right
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.ngram_index import NgramIndex
from dspark.core import DraftBlock
from dspark.engine.block_rows import merged
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_calibration import LiveCalibration
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import Proposer, StepStates
from dspark.kernels.rounds import DrawKind, RoundTable

_LEAST_MATCH, _MOST_LOOKED, _LONGEST_MATCH = 3, 5, 16
"""Tokens that must have stood there before; by how many they are looked for; how far counted."""
_PROMISE = 1.0
"""Tokens that a drafter's blocks promise, before it has drawn any."""
_LATEST = 0.1
"""Weight of the latest block in what blocks of a request promise."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """What may come next, and when it was said."""

    ids: Sequence[int]
    match_length: int
    at: int
    """Tokens of the text before it."""


@dataclass(slots=True)
class _Text:
    """What is kept of a request."""

    index: NgramIndex = field(
        default_factory=lambda: NgramIndex(
            min_length=_LEAST_MATCH, max_length=_MOST_LOOKED, longest=_LONGEST_MATCH
        )
    )
    unseen: list[_Copy] = field(default_factory=list)
    """Copies of which the text does not tell yet."""
    chosen: _Copy | None = None
    promise: float = _PROMISE
    """Tokens that its drafted blocks promised, on average of the latest."""


class CopyingPass:
    """A `Proposer` that asks another one for the requests that do not copy."""

    def __init__(self, drafting: Proposer, *, vocab_size: int, device: torch.device) -> None:
        """`vocab_size` of the target."""
        self._drafting = drafting
        self._vocab_size = vocab_size
        self._device = device
        self.block_size = drafting.block_size
        self.tap_layers = drafting.tap_layers
        self.num_ahead = drafting.num_ahead
        self._probs = torch.empty(0, device=device)  # memory of q, kept from step to step
        self._texts: WeakKeyDictionary[LiveRequest, _Text] = WeakKeyDictionary()
        # greedy texts repeat themselves more surely than sampled ones
        self._odds = {is_greedy: CopyOdds(self.block_size) for is_greedy in (True, False)}

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The drafter's."""
        return self._drafting.vocabulary

    def feed(self, states: StepStates) -> None:
        """The drafter takes all tokens in: the next round of any request may be drafted."""
        self._drafting.feed(states)

    def look(self, requests: Sequence[LiveRequest]) -> Mapping[int, Sequence[float]]:
        """The copies that promise more than a drafted block of their request."""
        found = {}
        for index, live in enumerate(requests):
            copy = self._read(live).chosen
            if copy is not None:
                found[index] = self._odds[live.params.is_greedy].survivals(copy.match_length)
        return found

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """The drafter makes up for those who do not copy."""
        drawn = [live for live in requests if self._texts[live].chosen is None]
        if drawn:
            self._drafting.catch_up(drawn, cache=cache)

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: RoundTable
    ) -> DraftBlock:
        """Blocks of K tokens, copied or drafted, as `look` has found."""
        texts = [self._texts[live] for live in requests]
        drawn = [r for r, text in enumerate(texts) if text.chosen is None]
        copied = [r for r, text in enumerate(texts) if text.chosen is not None]
        block = None
        if drawn:
            block = self._drafting.propose(
                [requests[r] for r in drawn],
                cache=cache,
                rounds=rounds.pick(drawn) if copied else rounds,
            )
            self._keep_promises([texts[r] for r in drawn], block)
            if not copied:
                return block
        copies = self._copied([requests[r] for r in copied], [texts[r] for r in copied])
        parts = [(copied, copies)]
        probs_RKS = None
        if block is not None:
            parts.append((drawn, replace(block, probs_RKS=None)))
            probs_RKS = block.probs_RKS
        whole = merged(*parts, num_rows=len(requests))
        if all(live.kind != DrawKind.MAXIMAL for live in requests):
            return whole
        found = self._joined(whole.tokens_RK, copied, drawn, probs_RKS)
        return replace(whole, probs_RKS=found)

    def _read(self, live: LiveRequest) -> _Text:
        """Takes in what the text has got since, and chooses."""
        text = self._texts.get(live)
        if text is None:
            text = self._texts[live] = _Text()
        odds, size = self._odds[live.params.is_greedy], self.block_size
        tokens = live.tokens
        while text.unseen and len(tokens) >= text.unseen[0].at + size:
            copy = text.unseen.pop(0)
            odds.saw(copy.match_length, num_right(copy.ids, tokens[copy.at : copy.at + size]))
        text.index.extend(tokens[len(text.index) :])
        text.chosen = None
        found = text.index.continuation(size)
        if found is not None:
            copy = _Copy(found.token_ids, found.match_length, len(tokens))
            text.unseen.append(copy)
            if odds.expected(copy.match_length) > text.promise and self._can_say(live, copy):
                text.chosen = copy
        return text

    def _can_say(self, live: LiveRequest, copy: _Copy) -> bool:
        """Whether q has a place for each token; only maximal coupling asks for q."""
        if live.kind != DrawKind.MAXIMAL or self.vocabulary is None:
            return True
        column_V, size = self.vocabulary.column_V, self.vocabulary.size
        return bool((column_V[torch.tensor(copy.ids, device=column_V.device)] < size).all())

    def _copied(self, requests: Sequence[LiveRequest], texts: Sequence[_Text]) -> DraftBlock:
        copies = [text.chosen for text in texts if text.chosen is not None]
        pairs = zip(requests, copies, strict=True)
        logits = [self._odds[r.params.is_greedy].logits(copy.match_length) for r, copy in pairs]
        return DraftBlock(
            tokens_RK=torch.tensor([copy.ids for copy in copies], device=self._device),
            probs_RKS=None,
            confidence_RK=torch.tensor(logits, device=self._device),
            is_copied=[True] * len(copies),
        )

    def _joined(
        self, tokens_RK: Tensor, copied: Sequence[int], drawn: Sequence[int], q: Tensor | None
    ) -> Tensor:
        """q over the draft vocabulary: one-hot where rows are copied, that of the drafter else.

        Rows of requests of the other coupling are read by nobody and may hold anything.
        """
        vocabulary = self.vocabulary
        columns_RK, num_columns = tokens_RK[list(copied)], self._vocab_size
        if vocabulary is not None:
            num_columns = vocabulary.size
            columns_RK = vocabulary.column_V[columns_RK].clamp(max=num_columns - 1)
        shape = (*tokens_RK.shape, num_columns)
        if self._probs.numel() < math.prod(shape):
            self._probs = torch.empty(math.prod(shape), device=self._device)
        probs_RKS = self._probs[: math.prod(shape)].view(shape)
        if q is not None:
            probs_RKS[list(drawn)] = q
        for row, columns_K in zip(copied, columns_RK, strict=True):
            probs_RKS[row].zero_().scatter_(1, columns_K[:, None], 1.0)
        return probs_RKS

    def _keep_promises(self, texts: Sequence[_Text], block: DraftBlock) -> None:
        if block.confidence_RK is None:
            return
        believed = LiveCalibration.believed(block.confidence_RK.tolist())
        for text, row in zip(texts, believed, strict=True):
            text.promise += _LATEST * (sum(row) - text.promise)
