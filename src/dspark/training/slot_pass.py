"""What a drafter kind gives the trainer: one pass over a batch, from states to supervised slots.

Everything else is shared by all kinds: batches, loss, optimiser, checkpoints, validation. A new
kind adds a class beside `BlockPass` and a line in `slot_pass_of`. It changes no weights.

Letters: A blocks, K block_size, T context rows, N supervised slots, S draft vocabulary, M taps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dspark.errors import ModelError
from dspark.models.drafter import Drafter
from dspark.models.packed_attention import PackedBlocks
from dspark.training.block_attention import block_attention


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
    def tap_weight(self) -> str:
        """The parameter [.., M] that multiplies the taps: a scale of its columns folds into it."""
        ...

    @property
    def has_confidence(self) -> bool: ...

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """Forward pass; `taps_TM` are the batch's taps, scaled, in the drafter's dtype."""
        ...

    def confidence(self, slots: Slots, *, stop_gradient: bool) -> Tensor:
        """Confidence logits, float32 [N]; gradients reach the slots unless stopped."""
        ...


def slot_pass_of(drafter: nn.Module) -> SlotPass:
    """The pass of this drafter's kind. Raises `ModelError` for a kind that cannot be trained."""
    if isinstance(drafter, Drafter):
        return BlockPass(drafter)
    raise ModelError(f"A drafter of type {type(drafter).__name__} cannot be trained.")


class BlockPass:
    """`dspark` and `dflash`: all slots of a block in one pass, then the heads, teacher forced."""

    def __init__(self, drafter: Drafter) -> None:
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

    @property
    def tap_weight(self) -> str:
        """Taps enter through `fc` alone."""
        return "fc.weight"

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter was built with a confidence head."""
        return self.drafter.confidence_head is not None

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """Context, backbone, and the sequential head along the true tokens."""
        drafter, blocks, previous_AK = self.drafter, batch.blocks, batch.previous_AK
        context_TD = drafter.context(taps_TM)
        context_kv = drafter.context_kv(context_TD, blocks.context_positions_T)
        attend = block_attention(context_kv, blocks, windows=drafter.config.windows)
        inputs_ND = drafter.block_inputs(previous_AK[:, 0])
        hidden_ND = drafter.backbone(inputs_ND, blocks.positions_N, attend)
        markov = drafter.markov_head
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
