"""Attention of training: all blocks of several sequences in one pass. It knows no loss, no model.

A block sees the context of its own sequence strictly before its anchor and its own K slots, never
another block or sequence (method section 7). Nothing is padded: contexts and slots are flattened.
Shape letters: legend in core.py; A for the blocks of a step, T for all context positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlocks:
    """Which blocks of a training step belong where; blocks are ordered by sequence."""

    context_lengths: Sequence[int]
    """Context positions of each sequence, in the order in which they are flattened to T."""
    num_blocks: Sequence[int]
    """Blocks of each sequence; their sum is A."""
    anchors_A: Tensor
    """int64, the anchor's position within its own sequence: at most its context length."""
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.context_lengths) == len(self.num_blocks)
        assert len(self.anchors_A) == sum(self.num_blocks)

    @property
    def positions_N(self) -> Tensor:
        """int64 [A * K], the position of each slot: anchor + j."""
        offsets_K = torch.arange(self.block_size, device=self.anchors_A.device)
        return (self.anchors_A[:, None] + offsets_K).view(-1)

    @property
    def context_positions_T(self) -> Tensor:
        """int64 [T], the position of each context row within its own sequence."""
        device = self.anchors_A.device
        return torch.cat([torch.arange(length, device=device) for length in self.context_lengths])


def visible_keys(
    anchors_A: Tensor, *, context_length: int, block_size: int, window: int | None
) -> Tensor:
    """Who may see whom in ONE sequence: bool [A * K, context_length + A * K].

    The single statement of the rule. A windowed layer hides positions at or below
    `position - window` of the slot that looks, in the context and in its own block.
    """
    device = anchors_A.device
    blocks_A = torch.arange(len(anchors_A), device=device)
    block_N = blocks_A.repeat_interleave(block_size)
    anchor_N = anchors_A.repeat_interleave(block_size)
    position_N = anchor_N + torch.arange(block_size, device=device).repeat(len(anchors_A))
    position_C = torch.arange(context_length, device=device)
    sees_context = position_C < anchor_N[:, None]
    sees_slots = block_N == block_N[:, None]
    if window is not None:
        lowest_N1 = (position_N + 1 - window)[:, None]
        sees_context &= position_C >= lowest_N1
        sees_slots &= position_N >= lowest_N1
    return torch.cat((sees_context, sees_slots), dim=1)


def packed_attention(
    context_kv: Sequence[tuple[Tensor, Tensor]],
    blocks: PackedBlocks,
    *,
    windows: Sequence[int | None],
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The `attend` of `Drafter.backbone` for a training step; differentiable in all its inputs.

    `context_kv[layer]` holds keys and values [T, G, E] of all contexts, `windows[layer]` the
    layer's sliding window. A slot always sees its own block, so that no row is empty even where
    the anchor stands at position 0.
    """
    slots = [count * blocks.block_size for count in blocks.num_blocks]
    anchors = torch.split(blocks.anchors_A, list(blocks.num_blocks))
    masks = {
        window: [
            visible_keys(
                anchors_A, context_length=length, block_size=blocks.block_size, window=window
            )
            for anchors_A, length in zip(anchors, blocks.context_lengths, strict=True)
        ]
        for window in set(windows)
    }

    def attend(layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        context_k, context_v = context_kv[layer]
        pieces = zip(
            torch.split(q_NHE, slots),
            _joined(context_k, k_NGE, blocks.context_lengths, slots),
            _joined(context_v, v_NGE, blocks.context_lengths, slots),
            masks[windows[layer]],
            strict=True,
        )
        return torch.cat([_attend_one(*piece) for piece in pieces])

    return attend


def _joined(
    context_TGE: Tensor, slots_NGE: Tensor, lengths: Sequence[int], slots: Sequence[int]
) -> list[Tensor]:
    """For each sequence, its context rows followed by its slots."""
    parts = zip(
        torch.split(context_TGE, list(lengths)), torch.split(slots_NGE, list(slots)), strict=True
    )
    return [torch.cat(part) for part in parts]


def _attend_one(q_NHE: Tensor, k_CGE: Tensor, v_CGE: Tensor, mask_NC: Tensor) -> Tensor:
    """Masked attention of one sequence's slots, heads outermost for the library's kernel."""
    out_HNE = functional.scaled_dot_product_attention(
        q_NHE.transpose(0, 1)[None],
        k_CGE.transpose(0, 1)[None],
        v_CGE.transpose(0, 1)[None],
        attn_mask=mask_NC,
        enable_gqa=q_NHE.shape[1] != k_CGE.shape[1],
    )
    return out_HNE[0].transpose(0, 1)
