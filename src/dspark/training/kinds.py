"""Which pass trains which drafter. It knows no batch and no loss."""

from torch import nn

from dspark.errors import ModelError
from dspark.models.chain import ChainDrafter
from dspark.models.drafter import Drafter
from dspark.training.block_pass import BlockPass
from dspark.training.chain_slots import ChainSlots
from dspark.training.slot_pass import SlotPass


def slot_pass_of(drafter: nn.Module) -> SlotPass:
    """The pass of this drafter's kind. Raises `ModelError` for a kind that cannot be trained."""
    match drafter:
        case Drafter():
            return BlockPass(drafter)
        case ChainDrafter():
            return ChainSlots(drafter)
        case _:
            raise ModelError(f"A drafter of type {type(drafter).__name__} cannot be trained.")
