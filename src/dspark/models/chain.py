"""A drafter that proposes one token after another: EAGLE-3, or a multi-token prediction module.

A pair (state at position i, token at i + 1) stands at position i and predicts the token at i + 2.
The states of committed positions come from the target's taps, those of drafted ones from the
drafter itself. It knows no request and no file; who keeps keys and values, and who sees whom, is
the caller's `attend`. Shape letters: legend in core.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.kernels.linear import PackedLinear, replace_linears
from dspark.models.drafter import (
    Attend,
    Project,
    RMSNorm,
    check_map,
    draft_rows,
    initialise,
    rotary_of,
)
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.models.eagle3 import Eagle3Layer
from dspark.models.mtp import MtpLayer


class ChainDrafter(nn.Module):
    """One layer over the target's embedding and LM head, which it neither owns nor copies.

    Its device is that of `embed_weight_VD`, its dtype that of its own parameters.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        embed_weight_VD: Tensor,
        head_weight_VD: Tensor,
        d2t_S: Tensor | None = None,
        generator: torch.Generator | None = None,
        has_own_embedding: bool = False,
        has_own_head: bool = False,
    ) -> None:
        """The arguments of `Drafter`, with the same meaning."""
        super().__init__()
        self.config = config
        self.has_own_embedding = has_own_embedding
        self.has_own_head = has_own_head
        device = embed_weight_VD.device
        self.d2t_S = None if d2t_S is None else d2t_S.to(device=device, dtype=torch.int64)
        check_map(config, self.d2t_S)
        self.embed_weight_VD = embed_weight_VD
        self.head_weight_SD = draft_rows(config, head_weight_VD, self.d2t_S)
        self._packed_head: Project | None = None
        self.rotary = rotary_of(config, device=device)
        with torch.device("meta"):
            self._build(config)
        if generator is not None:
            initialise(self, generator, device)

    def _build(self, config: DrafterConfig) -> None:
        self.fc: nn.Linear | None = None
        layer: Eagle3Layer | MtpLayer
        match config.kind:
            case DrafterKind.EAGLE3:
                self.fc = nn.Linear(config.taps_size, config.hidden_size, bias=False)
                layer = Eagle3Layer(config)
            case DrafterKind.MTP:
                layer = MtpLayer(config)
            case _:
                raise AssertionError(f"{config.kind} is no chain")
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        """Of the drafter's parameters; the shared tensors keep the target's."""
        return self.norm.weight.dtype

    def state(self, taps_NM: Tensor) -> Tensor:
        """Taps of N committed positions to states [N, D]."""
        taps_NM = taps_NM.to(self.dtype)
        return taps_NM if self.fc is None else self.fc(taps_NM)

    def advance(
        self, state_ND: Tensor, next_ids_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> Tensor:
        """States and the tokens that follow them (target ids) to the states of what comes next.

        `positions_N` are those of the states.
        """
        token_ND = functional.embedding(next_ids_N, self.embed_weight_VD).to(self.dtype)
        cos_N1E, sin_N1E = self.rotary.angles(positions_N)
        out_ND: Tensor = self._layer(state_ND, token_ND, cos_N1E, sin_N1E, attend)
        return out_ND

    def hidden(self, state_ND: Tensor) -> Tensor:
        """Advanced states to what the LM head reads, [N, D]."""
        hidden_ND: Tensor = self.norm(state_ND)
        return hidden_ND

    def base_logits(self, hidden_ND: Tensor) -> Tensor:
        """Draft logits [N, S], in the dtype of the LM head."""
        hidden_ND = hidden_ND.to(self.head_weight_SD.dtype)
        if self._packed_head is not None:
            return self._packed_head(hidden_ND)
        return functional.linear(hidden_ND, self.head_weight_SD)

    def pack(self, *, quantization: str | None = None, head: Project | None = None) -> None:
        """Swap all matrix products for packed ones: serving on a CPU; it ends training.

        `head`: the target's own packed LM head, to share where the whole vocabulary is proposed.
        """
        layer = self._layer
        layer.self_attn.join()
        layer.mlp.join()
        replace_linears(self, quantization)
        if head is None or self.config.draft_vocab_size is not None or self.has_own_head:
            head = PackedLinear.pack(self.head_weight_SD, quantization=quantization).forward
        self._packed_head = head

    @property
    def _layer(self) -> Eagle3Layer | MtpLayer:
        return self.layers[0]  # type: ignore[return-value]  # ModuleList forgets its element type
