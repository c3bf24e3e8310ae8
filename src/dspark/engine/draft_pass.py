"""The drafter at work: it takes in taps of a step and proposes blocks for requests.

It knows pages, rows and the requests' sampling options; it does not decide what is verified.
Where the drafter is packed, operators feed its context and walk a block for plain requests
(`LiveRequest.is_plain`); the drafter's own modules do the same for all others.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from dspark.algorithms.acceptance import draw_draft
from dspark.algorithms.confidence import log_odds_of_best
from dspark.algorithms.noise import RoundNoise
from dspark.algorithms.sampling import RowContext, process_logits
from dspark.core import AttentionLayout, DraftBlock
from dspark.engine.backlog import Backlog
from dspark.engine.batch import Run, layout_of
from dspark.engine.block_rows import merged
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import StepStates
from dspark.kernels import selection
from dspark.kernels.attention import attention
from dspark.kernels.draft import feed_context, walk
from dspark.kernels.draft_round import DraftRound, WaitingTokens
from dspark.kernels.rounds import DrawKind, RoundTable
from dspark.kernels.stack import FusedStack
from dspark.models.attention import KVPages, LayerShape
from dspark.models.drafter import Drafter
from dspark.models.drafter_kernels import (
    backbone_stack,
    context_weights,
    draft_round,
    walk_weights,
)
from dspark.models.heads import ConfidenceHead
from dspark.models.kinds import vocabulary_of
from dspark.models.rotary import RotaryTables


class DraftPass:
    """A DSpark drafter, its pages, and its vocabulary: a `Proposer`."""

    num_ahead = 0

    def __init__(
        self, drafter: Drafter, *, num_pages: int, page_size: int, vocab_size: int
    ) -> None:
        config = drafter.config
        self.drafter = drafter
        self.block_size = config.block_size
        self.tap_layers = tuple(config.target_layer_ids)
        self.device = drafter.embed_weight_VD.device
        self._dtype = drafter.dtype
        shape = LayerShape(num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
        self._pages = KVPages.allocate(
            [shape] * config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=drafter.dtype,
            device=self.device,
        )
        self.vocabulary = vocabulary_of(drafter, vocab_size)
        self._num_columns = config.num_draft_tokens
        self._columns: dict[int, int] = {}
        self._windows = config.windows
        self._scale = config.head_dim**-0.5
        self._context = context_weights(drafter)
        self._stack = backbone_stack(drafter)
        if self._stack is not None:
            self._stack_pages = self._stack.bind(self._pages.keys, self._pages.values)
        self._walk_weights = walk_weights(drafter)
        self._round: DraftRound | None = None
        if self._context is not None and self._stack is not None and self._walk_weights is not None:
            self._round = draft_round(
                drafter,
                context=self._context,
                walk=self._walk_weights,
                pages=self._stack_pages,
                keys=self._pages.keys,
                values=self._pages.values,
            )
        self._tables = RotaryTables(drafter.angles)
        self._pending: StepStates | None = None  # of the latest step
        self._is_late = False  # whether a step was put off since the last block
        self._backlog = Backlog(num_pages=num_pages, page_size=page_size)
        self._probs = torch.empty(0, device=self.device)  # memory of q, kept from step to step

    def look(self, requests: Sequence[LiveRequest]) -> Mapping[int, Sequence[float]]:  # noqa: ARG002
        """None: every block is drawn."""
        return {}

    def feed(self, states: StepStates) -> None:
        """Take the tokens of a step in for the drafter's pages.

        They wait until a block is drawn, and longer where their request does not draft: that
        costs memory instead of the context's arithmetic. Rejected tokens may be among them: their
        positions are written again, by the next block and by a later step, before anything reads
        them.
        """
        if self._context is None:
            self._feed_by_modules(states)
            return
        if self._pending is not None:
            self._put_off(self._pending)
        self._pending = states

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        """Feed what these requests have left behind while they did not draft."""
        if self._pending is not None:
            if self._is_late:  # nobody drafted in the last step: not all of its requests draft now
                self._put_off(self._pending)
                self._pending = None
            else:
                self._backlog.forget(self._pending.layout.slots_N)
        self._is_late = False
        lengths = [len(live.tokens) - 1 for live in requests]
        for late in self._backlog.take(cache.table, [live.slot for live in requests], lengths):
            tokens = WaitingTokens(late.taps_NM, late.positions_N, late.places_N)
            self._write(tokens, max_visible=late.max_visible)

    def _put_off(self, states: StepStates) -> None:
        """The tokens of this step are not for whoever drafts next."""
        self._is_late = True
        taps_NM = states.taps_NM
        if taps_NM.dtype != self._dtype:
            taps_NM = taps_NM.to(self._dtype)
        self._backlog.keep(taps_NM, states.layout.slots_N)

    def write_fed(self) -> None:
        """Write keys and values of the context for the latest tokens."""
        max_visible, waiting = self._take_pending()
        for tokens in waiting:
            self._write(tokens, max_visible=max_visible)

    def _write(self, tokens: WaitingTokens, *, max_visible: int) -> None:
        assert self._context is not None
        cos_PE, sin_PE = self._tables.up_to(max_visible)
        feed_context(
            self._context,
            tokens.taps_NM,
            keys=self._pages.keys,
            values=self._pages.values,
            cos_PE=cos_PE,
            sin_PE=sin_PE,
            positions_N=tokens.positions_N,
            places_N=tokens.places_N,
        )

    def _take_pending(self) -> tuple[int, list[WaitingTokens]]:
        """The tokens of the latest step, which then wait no more, and the positions that they
        know."""
        states, self._pending = self._pending, None
        if states is None:
            return 0, []
        layout = states.layout
        tokens = WaitingTokens(states.taps_NM.to(self._dtype), layout.positions_N, layout.slots_N)
        return layout.max_visible, [tokens]

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: RoundTable
    ) -> DraftBlock:
        """One block of K tokens for each request, its last token being the anchor."""
        if self._round is not None and all(live.is_nearly_plain for live in requests):
            found = self._propose_at_once(self._round, requests, cache, rounds)
            if found is not None:
                return found
        self.write_fed()
        hidden_RKD = self._backbone(requests, cache, rounds)
        plain = []
        if self._walk_weights is not None:
            plain = [r for r, live in enumerate(requests) if live.is_plain]
        if plain and len(plain) == len(requests):
            block = self._walk_at_once(requests, hidden_RKD, rounds)
        elif plain:
            block = self._walk_apart(requests, hidden_RKD, rounds, plain)
        else:
            block = None
        return self._walk_by_modules(requests, hidden_RKD, rounds.noise) if block is None else block

    def _propose_at_once(
        self,
        draft_round: DraftRound,
        requests: Sequence[LiveRequest],
        cache: KVCache,
        rounds: RoundTable,
    ) -> DraftBlock | None:
        """All of it as one operator; `None` if a score is not finite."""
        fed, waiting = self._take_pending()
        last = max([len(live.tokens) for live in requests]) - 1 + self.block_size
        cos_PE, sin_PE = self._tables.up_to(max(fed, last))
        probs_RKS = self._memory_of_probs(requests)
        found = draft_round.run(
            waiting,
            cos_PE=cos_PE,
            sin_PE=sin_PE,
            table_RP=cache.table,
            rows=[live.slot for live in requests],
            rounds=rounds,
            probs_RKS=probs_RKS,
            forbidden=self._early_stops(requests),
        )
        if found is None:
            return None
        return DraftBlock(tokens_RK=found[0], probs_RKS=probs_RKS, confidence_RK=found[1])

    def _early_stops(self, requests: Sequence[LiveRequest]) -> list[int]:
        """Slots of all blocks and columns in turn: stop tokens that come too early."""
        cells: list[int] = []
        for r, live in enumerate(requests):
            for slot, token in live.early_stops(self.block_size):
                column = self._column_of(token)
                if column < self._num_columns:
                    cells += (r * self.block_size + slot, column)
        return cells

    def _column_of(self, token: int) -> int:
        """In the draft vocabulary, its size or more for a token that is not there."""
        if self.vocabulary is None:
            return token
        if token not in self._columns:
            self._columns[token] = int(self.vocabulary.column_V[token])
        return self._columns[token]

    def _walk_apart(
        self,
        requests: Sequence[LiveRequest],
        hidden_RKD: Tensor,
        rounds: RoundTable,
        plain: Sequence[int],
    ) -> DraftBlock | None:
        """The walk of plain requests as one operator, that of the others by modules."""
        block = self._walk_at_once(
            [requests[r] for r in plain], hidden_RKD[plain], rounds.pick(plain)
        )
        if block is None:
            return None
        others = sorted(set(range(len(requests))) - set(plain))
        rest = self._walk_by_modules(
            [requests[r] for r in others], hidden_RKD[others], rounds.noise.pick(others)
        )
        return merged((plain, block), (others, rest), num_rows=len(requests))

    def _feed_by_modules(self, states: StepStates) -> None:
        layout = states.layout
        ctx_ND = self.drafter.context(states.taps_NM)
        pages_N = layout.slots_N // self._pages.page_size
        rows_N = layout.slots_N % self._pages.page_size
        for (k_NGE, v_NGE), keys, values in zip(
            self.drafter.context_kv(ctx_ND, layout.positions_N),
            self._pages.keys,
            self._pages.values,
            strict=True,
        ):
            keys[pages_N, :, rows_N] = k_NGE
            values[pages_N, :, rows_N] = v_NGE

    def _backbone(
        self, requests: Sequence[LiveRequest], cache: KVCache, rounds: RoundTable
    ) -> Tensor:
        runs = [Run(r.slot, len(r.tokens) - 1, self.block_size) for r in requests]
        layout = layout_of(runs, cache, device=self.device, is_two_way=True)
        x_ND = self.drafter.block_inputs(rounds.anchors_R)
        hidden_ND = (
            self._stacked(self._stack, x_ND, layout)
            if self._stack is not None
            else self.drafter.backbone(x_ND, layout.positions_N, partial(self._attend, layout))
        )
        return hidden_ND.view(len(requests), self.block_size, -1)

    def _stacked(self, stack: FusedStack, x_ND: Tensor, layout: AttentionLayout) -> Tensor:
        cos_PE, sin_PE = self._tables.up_to(layout.max_visible)
        return stack.run(
            x_ND,
            cos_PE=cos_PE,
            sin_PE=sin_PE,
            pages=self._stack_pages,
            layout=layout,
        ).hidden_ND

    def _attend(
        self, layout: AttentionLayout, layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor
    ) -> Tensor:
        return attention(
            q_NHE,
            k_NGE,
            v_NGE,
            self._pages.keys[layer],
            self._pages.values[layer],
            layout.block_tables_RP,
            layout.query_starts_R1,
            layout.visible_N,
            layout.positions_N,
            layout.slots_N,
            max_visible=layout.max_visible,
            scale=self._scale,
            window=self._windows[layer],
        )

    def _walk_at_once(
        self, requests: Sequence[LiveRequest], hidden_RKD: Tensor, rounds: RoundTable
    ) -> DraftBlock | None:
        """The walk as one operator; `None` if a score is not finite."""
        assert self._walk_weights is not None
        probs_RKS = self._memory_of_probs(requests)
        found = walk(
            self._walk_weights,
            hidden_RKD.flatten(0, 1),
            block_size=self.block_size,
            rounds=rounds,
            d2t_S=None if self.vocabulary is None else self.vocabulary.d2t_S,
            probs_RKS=probs_RKS,
        )
        if found is None:
            return None
        tokens_RK, confidence_RK = found
        return DraftBlock(tokens_RK=tokens_RK, probs_RKS=probs_RKS, confidence_RK=confidence_RK)

    def _memory_of_probs(self, requests: Sequence[LiveRequest]) -> Tensor | None:
        if all(live.kind != DrawKind.MAXIMAL for live in requests):
            return None
        shape = (len(requests), self.block_size, self.drafter.config.num_draft_tokens)
        size = shape[0] * shape[1] * shape[2]
        if self._probs.numel() < size:
            self._probs = torch.empty(size, device=self.device)
        return self._probs[:size].view(shape)

    def _walk_by_modules(
        self, requests: Sequence[LiveRequest], hidden_RKD: Tensor, noise: RoundNoise
    ) -> DraftBlock:
        """Left to right: bias from what was drawn, draw, next slot (Eq. 4)."""
        drafter, num_rows = self.drafter, len(requests)
        base_RKS = drafter.base_logits(hidden_RKD.flatten(0, 1)).view(num_rows, self.block_size, -1)
        head = drafter.markov_head
        state = head.initial_state(num_rows) if head is not None else None
        prev_R = torch.tensor([r.tokens[-1] for r in requests], device=self.device)
        drafted: list[list[int]] = [[] for _ in requests]
        has_history = any(r.logit_state.shapes_logits for r in requests)
        tokens, probs, embeddings, odds = [], [], [], []
        rows = [RowContext(state=r.logit_state) for r in requests]
        for slot in range(self.block_size):
            logits_RS = base_RKS[:, slot]
            if head is not None:
                e_Rr = head.embed(prev_R)
                bias_RS, state = head.step(e_Rr, hidden_RKD[:, slot], state)
                logits_RS = logits_RS + bias_RS
                embeddings.append(e_Rr)
            if drafter.confidence_head is None:
                odds.append(log_odds_of_best(logits_RS))
            if has_history:
                rows = [
                    RowContext(state=r.logit_state, drafted=tuple(ids))
                    for r, ids in zip(requests, drafted, strict=True)
                ]
            scores = process_logits(
                logits_RS, rows, vocabulary=self.vocabulary, operators=selection.operators()
            )
            draw = draw_draft(
                scores,
                noise=noise,
                slot=slot,
                vocabulary=self.vocabulary,
            )
            prev_R = draw.tokens_R
            tokens.append(draw.tokens_R)
            probs.append(draw.probs_RS)
            if has_history:
                for ids, token in zip(drafted, draw.tokens_R.tolist(), strict=True):
                    ids.append(token)
        stacked = [p for p in probs if p is not None]
        return DraftBlock(
            tokens_RK=torch.stack(tokens, dim=1),
            probs_RKS=torch.stack(stacked, dim=1) if stacked else None,
            confidence_RK=torch.stack(odds, dim=1)
            if drafter.confidence_head is None
            else self._confidence(drafter.confidence_head, hidden_RKD, embeddings),
        )

    @staticmethod
    def _confidence(
        head: ConfidenceHead, hidden_RKD: Tensor, embeddings: Sequence[Tensor]
    ) -> Tensor:
        e_RKr = torch.stack(list(embeddings), dim=1) if head.rank > 0 else None
        logits_RK: Tensor = head(hidden_RKD, e_RKr)
        return logits_RK
