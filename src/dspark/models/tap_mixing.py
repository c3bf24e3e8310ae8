"""Each drafter layer reads its own mix of the tapped layers (after DFlare, arXiv 2606.02091).

    context of layer l = norm_l( sum_t softmax(mix_l)_t * gain_t . tap_t )

`gain` has one number for each tap channel: channels differ by two orders of magnitude. It takes
the place of the one projection `fc` that all layers share. Letters: legend in core.py; L layers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class TapMixing(nn.Module):
    """Taps [N, M] to one context a layer; few parameters and no matrix product."""

    def __init__(self, *, num_layers: int, num_taps: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.empty(num_taps * hidden_size))
        self.mix = nn.Parameter(torch.empty(num_layers, num_taps))
        self.norms = nn.ParameterList(
            nn.Parameter(torch.empty(hidden_size)) for _ in range(num_layers)
        )

    def forward(self, taps_NM: Tensor) -> Tensor:
        """[N, M] to [N, L, D]."""
        num_taps = self.mix.shape[1]
        parts_NTD = (taps_NM * self.gain).view(len(taps_NM), num_taps, -1)
        share_LT = self.mix.float().softmax(dim=1).to(taps_NM.dtype)
        mixed_NLD = torch.einsum("ntd,lt->nld", parts_NTD, share_LT)
        weight_LD = torch.stack(list(self.norms))
        normed = functional.rms_norm(mixed_NLD.float(), weight_LD.shape[1:], eps=self.eps)
        return normed.to(taps_NM.dtype) * weight_LD
