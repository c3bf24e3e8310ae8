"""What a drafter kind gives the trainer: one pass over a batch, from states to supervised slots.

Everything else is shared by all kinds: batches, loss, optimiser, checkpoints, validation. A new
kind adds a class beside `BlockPass` and a line in `kinds.slot_pass_of`. It changes no weights.

Letters: A blocks, K block_size, T context rows, N supervised slots, S draft vocabulary, M taps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dspark.models.drafter_base import DrafterBase
from dspark.models.packed_attention import PackedBlocks

AnyDrafter = TypeVar("AnyDrafter", bound=DrafterBase)


class Batch(Protocol):
    """What one pass reads; `data.batches.Batch` has it.

    `taps_TM` holds the contexts of all sequences, each up to its last anchor, and `ids_T` the
    tokens at the same positions; `rows_N` are the supervised slots among the A * K flattened
    ones, and `last_ND`, `lse_N` belong to those rows only. Slot k of a block whose anchor stands
    at a is fed the tokens up to `previous_AK[:, k]` (position a + k) and taught the next one.
    """

    @property
    def taps_TM(self) -> Tensor: ...
    @property
    def ids_T(self) -> Tensor: ...
    @property
    def blocks(self) -> PackedBlocks: ...
    @property
    def previous_AK(self) -> Tensor: ...
    @property
    def labels_AK(self) -> Tensor: ...
    @property
    def valid_AK(self) -> Tensor: ...
    @property
    def rows_N(self) -> Tensor: ...
    @property
    def last_ND(self) -> Tensor: ...
    @property
    def lse_N(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The supervised slots inside a drafter.

    Draft logits are hidden_ND @ head^T (+ state_Nr @ w2_Sr^T where there is a sequential head).
    `embedded_Nr` is what the confidence head reads beside `hidden_ND`.
    """

    hidden_ND: Tensor
    state_Nr: Tensor | None = None
    w2_Sr: Tensor | None = None
    embedded_Nr: Tensor | None = None


class DrafterSizes(Protocol):
    """What the trainer asks of any drafter's configuration, which is a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class SlotPass(Protocol):
    """One kind of drafter in training."""

    @property
    def module(self) -> nn.Module:
        """The trained parameters."""
        ...

    @property
    def sizes(self) -> DrafterSizes: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of the trained parameters."""
        ...

    @property
    def head_weight_SD(self) -> Tensor:
        """The target's LM head on the draft vocabulary; frozen."""
        ...

    @property
    def d2t_S(self) -> Tensor | None:
        """Draft id to target id, `None` without a draft vocabulary."""
        ...

    @property
    def tap_weight(self) -> str | None:
        """The parameter [.., M] that multiplies the taps: a scale of its columns folds into it.

        `None` where a norm reads them first: such taps are not scaled.
        """
        ...

    @property
    def has_confidence(self) -> bool: ...

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """Forward pass; `taps_TM` are the batch's taps, scaled, in the drafter's dtype."""
        ...

    def confidence(self, slots: Slots, *, stop_gradient: bool) -> Tensor:
        """Confidence logits, float32 [N]; gradients reach the slots unless stopped."""
        ...


class OverDrafter(Generic[AnyDrafter]):
    """The part of a `SlotPass` that reads the same of drafters of every kind."""

    def __init__(self, drafter: AnyDrafter) -> None:
        self.drafter = drafter

    @property
    def module(self) -> nn.Module:
        """The drafter."""
        return self.drafter

    @property
    def sizes(self) -> DrafterSizes:
        """The drafter's configuration."""
        return self.drafter.config

    @property
    def dtype(self) -> torch.dtype:
        """Of the drafter's parameters."""
        return self.drafter.dtype

    @property
    def head_weight_SD(self) -> Tensor:
        """The target's rows, shared."""
        return self.drafter.head_weight_SD

    @property
    def d2t_S(self) -> Tensor | None:
        """The drafter's map."""
        return self.drafter.d2t_S
