"""The DSpark drafter: its parallel backbone and what it shares. It knows no request, cache, file.

Slot j of a block stands at position anchor + j and predicts anchor + 1 + j; the slots of a block
see each other both ways and the context strictly before the anchor (method section 3). Who keeps
the context's keys and values, and who sees whom, is the caller's `attend`.
Shape letters: legend in core.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark.kernels.draft import block_inputs
from dspark.kernels.elementwise import rms_norm, rotary, silu_mul
from dspark.kernels.linear import side_by_side
from dspark.models.drafter_base import DrafterBase
from dspark.models.drafter_config import DrafterConfig
from dspark.models.heads import ConfidenceHead, SequentialHead, SequentialKind
from dspark.models.rotary import rotate
from dspark.models.tap_mixing import TapMixing

__all__ = ["Attend", "Drafter", "DrafterConfig"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q_NHE, k_NGE, v_NGE) -> out_NHE`: q, k, v of the block slots, q and k rotated."""


class Drafter(DrafterBase):
    """The parallel backbone and its heads."""

    norm: "RMSNorm"

    def _build(self, config: DrafterConfig) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fusion: TapMixing | None = None
        if config.tap_mixing:
            self.fusion = TapMixing(
                num_layers=config.num_hidden_layers,
                num_taps=len(config.target_layer_ids),
                hidden_size=size,
                eps=eps,
            )
        else:
            self.fc = nn.Linear(config.taps_size, size, bias=False)
            self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            DrafterLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.markov_head: SequentialHead | None = None
        if config.markov_rank > 0:
            self.markov_head = SequentialHead(
                SequentialKind(config.markov_head_type),
                hidden_size=size,
                rank=config.markov_rank,
                vocab_size=config.vocab_size,
                draft_vocab_size=config.num_draft_tokens,
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden_size=size, rank=rank)

    def context(self, taps_NM: Tensor) -> Tensor:
        """Taps of N committed positions to the context [N, D] that every layer reads.

        With `tap_mixing` [N, L, D], one for each layer.
        """
        if self.fusion is not None:
            mixed_NLD: Tensor = self.fusion(taps_NM.to(self.dtype))
            return mixed_NLD
        projected_ND: Tensor = self.hidden_norm(self.fc(taps_NM.to(self.dtype)))
        return projected_ND

    def context_kv(self, ctx_ND: Tensor, positions_N: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys (normed and rotated) and values [N, G, E] of the context, one pair a layer.

        They depend on nothing after their own position, so that a cache may keep them.
        """
        cos, sin = self.rotary.angles(positions_N)
        layers = self.decoder_layers()
        contexts = ctx_ND.unbind(1) if self.fusion is not None else [ctx_ND] * len(layers)
        return [
            layer.self_attn.keys_values(own_ND, cos, sin)
            for layer, own_ND in zip(layers, contexts, strict=True)
        ]

    def block_inputs(self, anchor_ids_R: Tensor) -> Tensor:
        """Embeddings [R * K, D] of `[anchor, mask, .., mask]` for each row, flattened."""
        mask_token_id = self.config.mask_token_id
        assert mask_token_id is not None, "a configuration of this kind has one"
        return block_inputs(
            self.embed_weight_VD,
            anchor_ids_R,
            mask_id=mask_token_id,
            block_size=self.config.block_size,
        ).to(self.dtype)

    def backbone(self, x_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Block slots through all layers to the hidden states [N, D] after the final norm."""
        cos, sin = self.rotary.angles(positions_N)
        for layer in self.decoder_layers():
            x_ND = layer(x_ND, cos, sin, attend)
        hidden_ND: Tensor = self.norm(x_ND)
        return hidden_ND

    def decoder_layers(self) -> list["DrafterLayer"]:
        """The layers in order."""
        return list(self.layers)  # type: ignore[arg-type]  # ModuleList forgets its element type


class DrafterLayer(nn.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend) -> Tensor:
        """Block slots [N, D] to [N, D]."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), cos_N1E, sin_N1E, attend)
        out_ND: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out_ND


class DrafterAttention(nn.Module):
    """Grouped-query attention with a norm per head; one `k_proj` for context and slots."""

    def __init__(self, config: DrafterConfig, index: int, *, input_size: int | None = None) -> None:
        """`input_size`: of the rows that are projected, where it is not the hidden size."""
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        has_bias = config.attention_bias
        size = config.hidden_size if input_size is None else input_size
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, query_size, bias=has_bias)
        self.k_proj = nn.Linear(size, key_size, bias=has_bias)
        self.v_proj = nn.Linear(size, key_size, bias=has_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=has_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.kv_proj: nn.Linear | None = None

    def forward(self, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend) -> Tensor:
        """Normed block slots [N, D] to what the residual stream gains [N, D]."""
        q_NHE = self._turned(self._heads(self.q_proj(x_ND)), self.q_norm, cos_N1E, sin_N1E)
        k_NGE, v_NGE = self.keys_values(x_ND, cos_N1E, sin_N1E)
        out_NHE = attend(self.index, q_NHE, k_NGE, v_NGE)
        out_ND: Tensor = self.o_proj(out_NHE.flatten(1))
        return out_ND

    def keys_values(self, x_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values [N, G, E] of context rows or normed slots."""
        if self.kv_proj is not None:
            k_NGE, v_NGE = self._heads(self.kv_proj(x_ND)).chunk(2, dim=1)
        else:
            k_NGE, v_NGE = self._heads(self.k_proj(x_ND)), self._heads(self.v_proj(x_ND))
        return self._turned(k_NGE, self.k_norm, cos_N1E, sin_N1E), v_NGE

    def join(self) -> None:
        """Serving: keys and values from one product."""
        self.kv_proj = side_by_side(self.k_proj, self.v_proj)
        del self.k_proj, self.v_proj

    def _turned(
        self, x_NHE: Tensor, norm: "RMSNorm | None", cos_N1E: Tensor, sin_N1E: Tensor
    ) -> Tensor:
        x_NHE = x_NHE.clone() if norm is None else norm(x_NHE)
        if torch.is_grad_enabled():
            return rotate(x_NHE, cos_N1E, sin_N1E)
        rotary(x_NHE, x_NHE[:, :0], cos_N1E[:, 0], sin_N1E[:, 0])  # in place: x is our own
        return x_NHE

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[-1] // self.head_dim, self.head_dim)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), no bias."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.gate_up_proj: nn.Linear | None = None

    def join(self) -> None:
        """Serving: gate and up from one product."""
        self.gate_up_proj = side_by_side(self.gate_proj, self.up_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        if self.gate_up_proj is not None:
            joined_ND: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x_ND)))
            return joined_ND
        out_ND: Tensor = self.down_proj(functional.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return out_ND


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast to the dtype of x, then times the weight (Qwen's order)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [.., size]."""
        if not torch.is_grad_enabled():
            return rms_norm(x, self.weight, self.eps)
        normed = functional.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return normed.to(x.dtype) * self.weight
