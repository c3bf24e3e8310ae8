"""A slot pass whose parameters are cut over the ranks by FSDP2. It changes no value of the pass."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from dspark.training.shards import shard
from dspark.training.slot_pass import Batch, DrafterSizes, SlotPass, Slots


class ShardedPass:
    """Runs another pass inside the module that FSDP2 gathers and scatters."""

    def __init__(self, inner: SlotPass, *, group: distributed.ProcessGroup) -> None:
        self._inner = inner
        self._unit = _Unit(inner)
        shard(self._unit, device=inner.head_weight_SD.device, group=group)

    @property
    def module(self) -> nn.Module:
        """The drafter; its parameters are shards outside a pass."""
        return self._inner.module

    @property
    def sizes(self) -> DrafterSizes:
        """Of the whole drafter."""
        return self._inner.sizes

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self._inner.dtype

    @property
    def head_weight_SD(self) -> Tensor:
        """The target's; whole on every rank."""
        return self._inner.head_weight_SD

    @property
    def d2t_S(self) -> Tensor | None:
        """The drafter's map."""
        return self._inner.d2t_S

    @property
    def tap_weight(self) -> str | None:
        """As of the inner pass."""
        return self._inner.tap_weight

    @property
    def has_confidence(self) -> bool:
        """As of the inner pass."""
        return self._inner.has_confidence

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """Gathers the parameters, fresh ones each time, and runs the inner pass."""
        assert isinstance(self._unit, FSDPModule)
        self._unit.reshard()
        hidden_ND, state_Nr, w2_Sr, embedded_Nr = self._unit(batch, taps_TM)
        return Slots(hidden_ND=hidden_ND, state_Nr=state_Nr, w2_Sr=w2_Sr, embedded_Nr=embedded_Nr)

    def confidence(self, slots: Slots, *, stop_gradient: bool) -> Tensor:
        """Follows `slots` at once, while the parameters are whole."""
        return self._inner.confidence(slots, stop_gradient=stop_gradient)


class _Unit(nn.Module):
    """What FSDP2 wraps: it finds outputs to hook in a tuple, not in a dataclass."""

    def __init__(self, inner: SlotPass) -> None:
        super().__init__()
        self.drafter = inner.module
        self._run = inner.slots

    def forward(self, batch: Batch, taps_TM: Tensor) -> tuple[Any, ...]:
        """The fields of `Slots`."""
        slots = self._run(batch, taps_TM)
        return slots.hidden_ND, slots.state_Nr, slots.w2_Sr, slots.embedded_Nr
