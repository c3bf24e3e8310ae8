"""A drafter that proposes one token after another: EAGLE-3, or a multi-token prediction module.

A pair (state at position i, token at i + 1) stands at position i and predicts the token at i + 2.
The states of committed positions come from the target's taps, those of drafted ones from the
drafter itself. It knows no request and no file; who keeps keys and values, and who sees whom, is
the caller's `attend`. Shape letters: legend in core.py.
"""

from torch import Tensor, nn
from torch.nn import functional

from dspark.models.drafter import Attend, RMSNorm
from dspark.models.drafter_base import DrafterBase
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.models.eagle3 import Eagle3Layer
from dspark.models.mtp import MtpLayer


class ChainDrafter(DrafterBase):
    """One layer, called token after token."""

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

    @property
    def _layer(self) -> Eagle3Layer | MtpLayer:
        return self.layers[0]  # type: ignore[return-value]  # ModuleList forgets its element type
