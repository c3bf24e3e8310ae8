"""Attention of training blocks without the work that their isolation makes pointless.

Same contract as `models.packed_attention.packed_attention`, which is its reference: there every
slot is scored against every slot of its sequence and masked, here only against its own block.
It knows no loss and no weights. Shape letters: legend in core.py; A blocks, T context rows.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.models.packed_attention import PackedBlocks


def block_attention(
    context_kv: Sequence[tuple[Tensor, Tensor]],
    blocks: PackedBlocks,
    *,
    windows: Sequence[int | None],
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The `attend` of `Drafter.backbone`: context strictly before the anchor, and one's block.

    Per sequence one product against the context; the K x K scores of all blocks at once; one
    softmax over both. `context_kv[layer]` holds keys and values [T, G, E] of all contexts.
    """
    size = blocks.block_size
    slots = [count * size for count in blocks.num_blocks]
    anchors = torch.split(blocks.anchors_A, list(blocks.num_blocks))

    def attend(layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        num_slots, num_heads, width = q_NHE.shape
        groups = k_NGE.shape[1]
        share = num_heads // groups
        window = windows[layer]
        q_NGJE = (q_NHE * (1.0 / math.sqrt(width))).view(num_slots, groups, share, width)
        own_GNJK = _own_scores(q_NGJE, k_NGE, size, window)
        lengths = list(blocks.context_lengths)
        pieces = zip(
            torch.split(q_NGJE, slots),
            torch.split(own_GNJK, slots, dim=1),
            anchors,
            torch.split(context_kv[layer][0], lengths),
            torch.split(context_kv[layer][1], lengths),
            torch.split(v_NGE, slots),
            strict=True,
        )
        return torch.cat([_attend_one(*piece, window=window) for piece in pieces])

    return attend


def _own_scores(q_NGJE: Tensor, k_NGE: Tensor, size: int, window: int | None) -> Tensor:
    """Scores of each slot against the K slots of its block: [G, N, share, K]."""
    num_slots, groups, share, width = q_NGJE.shape
    q_AGXE = q_NGJE.view(-1, size, groups, share, width).transpose(1, 2)
    k_AGKE = k_NGE.view(-1, size, groups, width).transpose(1, 2)
    flat_q = q_AGXE.reshape(-1, size * share, width)
    flat_k = k_AGKE.reshape(-1, size, width)
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2))
    scores = scores.view(-1, groups, size, share, size)
    if window is not None:
        slot_K = torch.arange(size, device=scores.device)
        is_hidden_KK = slot_K[None, :] <= slot_K[:, None] - window
        scores = scores.masked_fill(is_hidden_KK[:, None, :], float("-inf"))
    return scores.transpose(0, 1).reshape(groups, num_slots, share, size)


def _attend_one(
    q_NGJE: Tensor,
    own_GNJK: Tensor,
    anchors_R: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    v_NGE: Tensor,
    *,
    window: int | None,
) -> Tensor:
    """One sequence: softmax over its context and each slot's own block, [N, H, E]."""
    num_slots, groups, share, width = q_NGJE.shape
    size = own_GNJK.shape[-1]
    num_context = k_TGE.shape[0]
    bias_XT = _bias(anchors_R, num_context, size, share, window, q_NGJE.dtype)
    q_GXE = q_NGJE.transpose(0, 1).reshape(groups, num_slots * share, width)
    scores_GXT = torch.baddbmm(bias_XT, q_GXE, k_TGE.permute(1, 2, 0))
    both = torch.cat((scores_GXT, own_GNJK.flatten(1, 2)), dim=2).softmax(dim=2)
    from_context = torch.bmm(both[..., :num_context], v_TGE.transpose(0, 1))
    own_RGXK = both[..., num_context:].reshape(groups, -1, size * share, size).transpose(0, 1)
    v_RGKE = v_NGE.view(-1, size, groups, width).transpose(1, 2)
    from_own = torch.matmul(own_RGXK, v_RGKE).transpose(0, 1).reshape(from_context.shape)
    out = (from_context + from_own).view(groups, num_slots, share, width)
    return out.transpose(0, 1).reshape(num_slots, groups * share, width)


def _bias(
    anchors_R: Tensor,
    num_context: int,
    size: int,
    share: int,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """0 where a slot sees a context position, -inf elsewhere: [1, N * share, T]."""
    device = anchors_R.device
    position_T = torch.arange(num_context, device=device)
    is_hidden_RT = position_T >= anchors_R[:, None]
    is_hidden_RKT = is_hidden_RT[:, None, :].expand(-1, size, -1)
    if window is not None:
        slot_RK = anchors_R[:, None] + torch.arange(size, device=device)
        is_hidden_RKT = is_hidden_RKT | (position_T <= slot_RK[:, :, None] - window)
    bias_RKT = torch.zeros(is_hidden_RKT.shape, dtype=dtype, device=device)
    bias_RKT = bias_RKT.masked_fill(is_hidden_RKT, float("-inf"))
    return bias_RKT.flatten(0, 1).repeat_interleave(share, dim=0)[None]
