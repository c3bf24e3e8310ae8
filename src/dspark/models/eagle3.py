"""The layer of an EAGLE-3 drafter (Li et al. 2026). It knows no head, no cache and no block.

Queries, keys and values are projected from [embedding ; state], each under its own norm; the
residual stream is the state alone. Names and order are those of the published checkpoints.
Shape letters: legend in core.py.
"""

import torch
from torch import Tensor, nn

from dspark.models.drafter import Attend, DrafterAttention, RMSNorm, SwiGLU
from dspark.models.drafter_config import DrafterConfig


class Eagle3Layer(nn.Module):
    """One step of the chain: the state at a position and the next token give the next state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.has_normed_residual = config.has_normed_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = DrafterAttention(config, 0, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def forward(
        self, state_ND: Tensor, token_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend
    ) -> Tensor:
        """States and embeddings of the tokens after them, [N, D] each, to states [N, D]."""
        normed_ND = self.hidden_norm(state_ND)
        both_NX = torch.cat((self.input_layernorm(token_ND), normed_ND), dim=-1)
        x_ND = normed_ND if self.has_normed_residual else state_ND
        x_ND = x_ND + self.self_attn(both_NX, cos_N1E, sin_N1E, attend)
        out_ND: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out_ND
