"""A chain drafter at work: one pass over what was committed, then one for each drafted token.

It knows pages, rows and the requests' sampling options; it does not decide what is verified.

With the anchor at position n, the pairs (state i, token i + 1) of positions 0..n-1 are the
drafter's context; pair n - 1 gives the first drafted token. Drafted tokens stand at positions n
and on; the next round writes over them. Shape letters: legend in core.py.
"""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspark.algorithms.acceptance import draw_draft
from dspark.algorithms.confidence import log_odds_of_best
from dspark.algorithms.sampling import RowContext, process_logits
from dspark.core import AttentionLayout, DraftBlock
from dspark.engine.batch import Run, layout_of
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import StepStates
from dspark.kernels import selection
from dspark.kernels.attention import attention
from dspark.kernels.rounds import RoundTable
from dspark.models.attention import KVPages, LayerShape
from dspark.models.chain import ChainDrafter
from dspark.models.kinds import vocabulary_of


class ChainPass:
    """A chain drafter, its pages, and its vocabulary: a `Proposer`."""

    num_ahead = 1  # a pair holds the next token

    def __init__(
        self, drafter: ChainDrafter, *, num_pages: int, page_size: int, vocab_size: int
    ) -> None:
        config = drafter.config
        self.drafter = drafter
        self.block_size = config.block_size
        self.tap_layers = tuple(config.target_layer_ids)
        self.vocabulary = vocabulary_of(drafter, vocab_size)
        self.device = drafter.embed_weight_VD.device
        shape = LayerShape(num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
        self._pages = KVPages.allocate(
            [shape],
            num_pages=num_pages,
            page_size=page_size,
            dtype=drafter.dtype,
            device=self.device,
        )
        self._states = torch.zeros(
            (num_pages * page_size, config.hidden_size), dtype=drafter.dtype, device=self.device
        )
        self._num_pairs: WeakKeyDictionary[LiveRequest, tuple[int, int]] = WeakKeyDictionary()
        self._window = config.windows[0]
        self._scale = config.head_dim**-0.5

    def look(self, requests: Sequence[LiveRequest]) -> Mapping[int, Sequence[float]]:  # noqa: ARG002
        """None: every block is drawn."""
        return {}

    def feed(self, states: StepStates) -> None:
        """Keep the states of a step's tokens; keys and values wait for each one's next token.

        Nothing of a rejected token is read: its position is fed again before that.
        """
        self._states[states.layout.slots_N] = self.drafter.state(states.taps_NM)

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """Nothing: the first pass of a block does it."""

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: RoundTable
    ) -> DraftBlock:
        """K tokens for each request, each drawn before the next one is computed."""
        state_RD, noise = self._catch_up(requests, cache), rounds.noise
        drafted: list[list[int]] = [[] for _ in requests]
        tokens, probs, confidence = [], [], []
        for slot in range(self.block_size):
            logits_RS = self.drafter.base_logits(self.drafter.hidden(state_RD))
            rows = [
                RowContext(state=r.logit_state, drafted=tuple(ids))
                for r, ids in zip(requests, drafted, strict=True)
            ]
            draw = draw_draft(
                process_logits(
                    logits_RS, rows, vocabulary=self.vocabulary, operators=selection.operators()
                ),
                noise=noise,
                slot=slot,
                vocabulary=self.vocabulary,
            )
            confidence.append(log_odds_of_best(logits_RS))
            tokens.append(draw.tokens_R)
            probs.append(draw.probs_RS)
            if slot + 1 == self.block_size:
                break
            for ids, token in zip(drafted, draw.tokens_R.tolist(), strict=True):
                ids.append(token)
            runs = [
                Run(slot=r.slot, start=len(r.tokens) - 1 + slot, num_tokens=1) for r in requests
            ]
            layout = layout_of(runs, cache, device=self.device)
            state_RD = self._advance(state_RD, draw.tokens_R, layout)
        stacked = [p for p in probs if p is not None]
        return DraftBlock(
            tokens_RK=torch.stack(tokens, dim=1),
            probs_RKS=torch.stack(stacked, dim=1) if stacked else None,
            confidence_RK=torch.stack(confidence, dim=1),
        )

    def _catch_up(self, requests: Sequence[LiveRequest], cache: KVCache) -> Tensor:
        """All pairs that are committed and not yet written; the states [R, D] of the last ones.

        A request that starts, or starts again, writes them from its first position on, also in
        pages that it shares: whoever writes there writes the same, and nobody may have yet.
        """
        runs, ids = [], []
        for live in requests:
            num_pairs = len(live.tokens) - 1
            num_starts, num_written = self._num_pairs.get(live, (0, 0))
            if num_starts != live.num_starts:
                num_written = 0
            start = min(num_written, num_pairs - 1)
            runs.append(Run(slot=live.slot, start=start, num_tokens=num_pairs - start))
            ids.extend(live.tokens[start + 1 :])
            self._num_pairs[live] = (live.num_starts, num_pairs)
        layout = layout_of(runs, cache, device=self.device)
        state_ND = self._states[layout.slots_N]
        state_ND = self._advance(state_ND, torch.tensor(ids, device=self.device), layout)
        ends_R = layout.query_starts_R1[1 : len(requests) + 1].long() - 1
        return state_ND[ends_R]

    def _advance(self, state_ND: Tensor, next_ids_N: Tensor, layout: AttentionLayout) -> Tensor:
        def attend(_layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
            return attention(
                q_NHE,
                k_NGE,
                v_NGE,
                self._pages.keys[0],
                self._pages.values[0],
                layout.block_tables_RP,
                layout.query_starts_R1,
                layout.visible_N,
                layout.positions_N,
                layout.slots_N,
                max_visible=layout.max_visible,
                scale=self._scale,
                window=self._window,
            )

        return self.drafter.advance(state_ND, next_ids_N, layout.positions_N, attend)
