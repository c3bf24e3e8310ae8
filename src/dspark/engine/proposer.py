"""What the cycle needs of whatever proposes tokens, a drafter or anything else.

It knows no drafter. A proposer sees every token that the target runs (`feed`) and is asked for
blocks (`propose`); the cycle decides what is verified, accepts and commits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.core import AttentionLayout, DraftBlock
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.kernels.rounds import RoundTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """What a pass of the target leaves behind; row n belongs to flattened token n of the step.

    `ids_N` int64, the tokens that ran. `hidden_ND`: the last hidden state after the final norm.
    `taps_NM`: the outputs of the proposer's `tap_layers` side by side. `layout`: positions and
    places in the pages, whose numbers target and proposer share.
    """

    ids_N: Tensor
    hidden_ND: Tensor
    taps_NM: Tensor
    layout: AttentionLayout


class Proposer(Protocol):
    """Proposes blocks of tokens for requests (`engine.draft_pass.DraftPass` is one)."""

    @property
    def block_size(self) -> int:
        """K: tokens of a block."""

    @property
    def tap_layers(self) -> Sequence[int]:
        """Layers of the target whose outputs `feed` wants; -1 is the embedding."""

    @property
    def num_ahead(self) -> int:
        """Tokens behind a position that what is kept of the position depends on: pages of equal
        words are shared by requests, if these tokens are equal too."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The columns of `DraftBlock.probs_RKS`; `None`: the target's own ids."""

    def look(self, requests: Sequence[LiveRequest]) -> Mapping[int, Sequence[float]]:
        """Blocks that are there before anything is drawn, and ask no drafter: their survivals [K]
        by index of the request. It comes first in a step, with all requests that decode."""

    def feed(self, states: StepStates) -> None:
        """Take in the tokens of a step, before it is known which drafts among them are accepted.

        A rejected position comes again in a later step, before anything may read it.
        """

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """Make up for what was put off while these requests did not draft; comes before `propose`.

        It takes the longer the longer they rested, so it is no part of what a block costs.
        """

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: RoundTable
    ) -> DraftBlock:
        """One block for each request: `tokens[-1]` is its anchor, all before it was fed.

        `rounds` has a column for each of them.
        """
