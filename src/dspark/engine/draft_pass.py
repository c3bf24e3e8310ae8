"""The drafter at work: it takes in taps of a step and proposes blocks for requests.

It knows pages, rows and the requests' sampling options; it does not decide what is verified.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.algorithms.acceptance import draw_draft
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.noise import RoundNoise
from dspark.algorithms.sampling import RowContext, process_logits
from dspark.core import DraftBlock
from dspark.engine.batch import Run, layout_of
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import StepStates
from dspark.kernels import selection
from dspark.kernels.attention import attention
from dspark.models.attention import KVPages, LayerShape
from dspark.models.drafter import Drafter


class DraftPass:
    """A DSpark drafter, its pages, and its vocabulary: a `Proposer`."""

    def __init__(
        self, drafter: Drafter, *, num_pages: int, page_size: int, vocab_size: int
    ) -> None:
        config = drafter.config
        self.drafter = drafter
        self.block_size = config.block_size
        self.tap_layers = tuple(config.target_layer_ids)
        self.device = drafter.embed_weight_VD.device
        shape = LayerShape(num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
        self._pages = KVPages.allocate(
            [shape] * config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=drafter.dtype,
            device=self.device,
        )
        self.vocabulary = _vocabulary(drafter, vocab_size)
        self._windows = config.windows
        self._scale = config.head_dim**-0.5

    def feed(self, states: StepStates) -> None:
        """Write the context's keys and values of a step's tokens into the drafter's pages.

        Rejected tokens may be among them: their positions are written again, by the next block
        and by the next step, before anything reads them.
        """
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

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, noise: RoundNoise
    ) -> DraftBlock:
        """One block of K tokens for each request, its last token being the anchor."""
        hidden_RKD = self._backbone(requests, cache)
        return self._walk(requests, hidden_RKD, noise)

    def _backbone(self, requests: Sequence[LiveRequest], cache: KVCache) -> Tensor:
        anchors_R = torch.tensor([r.tokens[-1] for r in requests], device=self.device)
        runs = [
            Run(slot=r.slot, start=len(r.tokens) - 1, num_tokens=self.block_size) for r in requests
        ]
        layout = layout_of(runs, cache, device=self.device, is_two_way=True)

        def attend(layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
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

        hidden_ND = self.drafter.backbone(
            self.drafter.block_inputs(anchors_R), layout.positions_N, attend
        )
        return hidden_ND.view(len(requests), self.block_size, -1)

    def _walk(
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
        tokens, probs, embeddings = [], [], []
        rows = [RowContext(state=r.logit_state) for r in requests]
        for slot in range(self.block_size):
            logits_RS = base_RKS[:, slot]
            if head is not None:
                e_Rr = head.embed(prev_R)
                bias_RS, state = head.step(e_Rr, hidden_RKD[:, slot], state)
                logits_RS = logits_RS + bias_RS
                embeddings.append(e_Rr)
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
            confidence_RK=self._confidence(hidden_RKD, embeddings),
        )

    def _confidence(self, hidden_RKD: Tensor, embeddings: Sequence[Tensor]) -> Tensor | None:
        head = self.drafter.confidence_head
        if head is None:
            return None
        e_RKr = torch.stack(list(embeddings), dim=1) if head.rank > 0 else None
        logits_RK: Tensor = head(hidden_RKD, e_RKr)
        return logits_RK


def _vocabulary(drafter: Drafter, vocab_size: int) -> DraftVocabulary | None:
    if drafter.d2t_S is not None:
        return DraftVocabulary.of(drafter.d2t_S, vocab_size=vocab_size)
    num_columns = drafter.config.num_draft_tokens
    if num_columns == vocab_size:
        return None
    ids_S = torch.arange(num_columns, device=drafter.embed_weight_VD.device)
    return DraftVocabulary.of(ids_S, vocab_size=vocab_size)
