"""The pass of `dspark` and `dflash` in training. It knows no loss and changes no weights.

Letters: legend in core.py; A blocks, N supervised slots, r rank of the sequential head.
"""

import torch
from torch import Tensor

from dspark.models.drafter import Drafter
from dspark.training.block_attention import block_attention
from dspark.training.slot_pass import Batch, OverDrafter, Slots


class BlockPass(OverDrafter[Drafter]):
    """`dspark` and `dflash`: all slots of a block in one pass, then the heads, teacher forced."""

    @property
    def tap_weight(self) -> str:
        """Taps enter through `fc`, or through the gain of the mixing, alone."""
        return "fc.weight" if self.drafter.fusion is None else "fusion.gain"

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter was built with a confidence head."""
        return self.drafter.confidence_head is not None

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """Context, backbone, and the sequential head along the true tokens."""
        previous_AK, markov = batch.previous_AK, self.drafter.markov_head
        hidden_ND = self._hidden(batch, taps_TM)
        if markov is None:
            return Slots(hidden_ND=hidden_ND[batch.rows_N])
        hidden_AKD = hidden_ND.view(*previous_AK.shape, -1)
        state_AKr = markov.unroll_features(previous_AK, hidden_AKD)
        return Slots(
            hidden_ND=hidden_ND[batch.rows_N],
            state_Nr=state_AKr.flatten(0, 1)[batch.rows_N],
            w2_Sr=markov.markov_w2.weight,
            embedded_Nr=markov.embed(previous_AK).flatten(0, 1)[batch.rows_N],
        )

    @torch.no_grad()
    def draft(self, batch: Batch, taps_TM: Tensor, generator: torch.Generator) -> Tensor:
        """Blocks [A, K] drawn as serving does at temperature 1, target ids."""
        drafter, markov = self.drafter, self.drafter.markov_head
        hidden_AKD = self._hidden(batch, taps_TM).view(*batch.previous_AK.shape, -1)
        previous_A, drawn = batch.previous_AK[:, 0], []
        state = None if markov is None else markov.initial_state(len(previous_A))
        for hidden_AD in hidden_AKD.unbind(1):
            logits_AS = drafter.base_logits(hidden_AD)
            if markov is not None:
                bias_AS, state = markov.step(markov.embed(previous_A), hidden_AD, state)
                logits_AS = logits_AS + bias_AS
            odds_AS = logits_AS.float().softmax(dim=1).cpu()
            column_A = torch.multinomial(odds_AS, 1, generator=generator)[:, 0]
            column_A = column_A.to(previous_A.device)
            previous_A = column_A if self.d2t_S is None else self.d2t_S[column_A]
            drawn.append(previous_A)
        return torch.stack(drawn, dim=1)

    def _hidden(self, batch: Batch, taps_TM: Tensor) -> Tensor:
        """All slots [A * K, D] after the backbone."""
        drafter, blocks = self.drafter, batch.blocks
        context_TD = drafter.context(taps_TM)
        context_kv = drafter.context_kv(context_TD, blocks.context_positions_T)
        attend = block_attention(context_kv, blocks, windows=drafter.config.windows)
        inputs_ND = drafter.block_inputs(batch.previous_AK[:, 0])
        return drafter.backbone(inputs_ND, blocks.positions_N, attend)

    def confidence(self, slots: Slots, *, stop_gradient: bool) -> Tensor:
        """Eq. 7 at each slot."""
        head = self.drafter.confidence_head
        assert head is not None
        hidden_ND = slots.hidden_ND
        embedded_Nr = slots.embedded_Nr if head.rank > 0 else None
        if stop_gradient:
            hidden_ND = hidden_ND.detach()
            embedded_Nr = None if embedded_Nr is None else embedded_Nr.detach()
        logits_N: Tensor = head(hidden_ND, embedded_Nr)
        return logits_N
