"""The module of multi-token prediction (DeepSeek-V3, section 2.2), its attention GQA.

State and embedding are normed, joined by one projection, and pass one ordinary layer. It knows
no head, no cache and no block. Names are those of DeepSeek-V3 within its layer.
Shape letters: legend in core.py.
"""

import torch
from torch import Tensor, nn

from dspark.models.drafter import Attend, DrafterAttention, RMSNorm, SwiGLU
from dspark.models.drafter_config import DrafterConfig


class MtpLayer(nn.Module):
    """One step of the chain: the state at a position and the next token give the next state."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = DrafterAttention(config, 0)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def forward(
        self, state_ND: Tensor, token_ND: Tensor, cos_N1E: Tensor, sin_N1E: Tensor, attend: Attend
    ) -> Tensor:
        """States and embeddings of the tokens after them, [N, D] each, to states [N, D]."""
        both_NX = torch.cat((self.enorm(token_ND), self.hnorm(state_ND)), dim=-1)
        x_ND = self.eh_proj(both_NX)
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), cos_N1E, sin_N1E, attend)
        out_ND: Tensor = x_ND + self.mlp(self.post_attention_layernorm(x_ND))
        return out_ND
