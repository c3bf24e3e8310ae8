"""Training-time test of a chain drafter (EAGLE-3): it learns on the states that it will see.

One pass over all contexts gives the first slot of every block; each further slot is computed from
the drafter's own state at the one before, fed the true token. That is the order of serving, so
slot k of an anchor at a equals what `engine.chain_pass` computes there.

Letters: legend in core.py; A blocks, T context rows, X = A * heads of a group, J = s slots so far.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dspark.models.chain import ChainDrafter
from dspark.models.drafter import Attend
from dspark.models.packed_attention import PackedBlocks
from dspark.training.slot_pass import Batch, OverDrafter, Slots


class ChainSlots(OverDrafter[ChainDrafter]):
    """`eagle3` and `mtp`: slot after slot, teacher forced, over the drafter's own states."""

    @property
    def tap_weight(self) -> str | None:
        """EAGLE-3 fuses its taps with `fc`; an MTP module norms its only one."""
        return None if self.drafter.fc is None else "fc.weight"

    @property
    def has_confidence(self) -> bool:
        """No chain has a confidence head."""
        return False

    def slots(self, batch: Batch, taps_TM: Tensor) -> Slots:
        """The states of all slots after the final norm, at the supervised rows."""
        drafter, blocks, previous_AK = self.drafter, batch.blocks, batch.previous_AK
        kept: list[tuple[Tensor, Tensor]] = []
        window = drafter.config.windows[0]
        state_TD = drafter.advance(
            drafter.state(taps_TM),
            next_ids(batch.ids_T, blocks, previous_AK[:, 0]),
            blocks.context_positions_T,
            context_attention(blocks.context_lengths, kept, window=window),
        )
        state_AD = state_TD[pair_rows(blocks)]
        attend = ChainAttention(kept[0], blocks, window=window)
        states = [state_AD]
        for slot in range(1, blocks.block_size):
            positions_A = blocks.anchors_A + (slot - 1)
            state_AD = drafter.advance(state_AD, previous_AK[:, slot], positions_A, attend)
            states.append(state_AD)
        hidden_ND = drafter.hidden(torch.stack(states, dim=1).flatten(0, 1)[batch.rows_N])
        return Slots(hidden_ND=hidden_ND)

    def confidence(self, _slots: Slots, *, stop_gradient: bool) -> Tensor:  # noqa: ARG002
        """There is none."""
        raise AssertionError("a chain has no confidence head")


def next_ids(ids_T: Tensor, blocks: PackedBlocks, anchor_ids_A: Tensor) -> Tensor:
    """The token after each context row: the next row's, and the last anchor at a sequence's end."""
    ends = torch.tensor(blocks.context_lengths).cumsum(0) - 1
    lasts = torch.tensor(blocks.num_blocks).cumsum(0) - 1
    next_T = ids_T.roll(-1)
    next_T[ends.to(ids_T.device)] = anchor_ids_A[lasts.to(ids_T.device)]
    return next_T


def pair_rows(blocks: PackedBlocks) -> Tensor:
    """The context row right before each anchor: its pair predicts the block's first token."""
    lengths = torch.tensor(blocks.context_lengths)
    starts_R = lengths.cumsum(0) - lengths
    starts_A = starts_R.repeat_interleave(torch.tensor(blocks.num_blocks))
    assert int(blocks.anchors_A.min()) >= 1, "an anchor follows at least one token"
    return starts_A.to(blocks.anchors_A.device) + blocks.anchors_A - 1


def context_attention(
    lengths: Sequence[int], kept: list[tuple[Tensor, Tensor]], *, window: int | None
) -> Attend:
    """Causal attention within each sequence; leaves keys and values [T, G, E] in `kept`."""

    def attend(_layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        kept.append((k_TGE, v_TGE))
        pieces = zip(*(torch.split(x, list(lengths)) for x in (q_THE, k_TGE, v_TGE)), strict=True)
        return torch.cat([_causal(q, k, v, window=window) for q, k, v in pieces])

    return attend


def _causal(q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, *, window: int | None) -> Tensor:
    mask_TT = None
    if window is not None:
        place_T = torch.arange(len(q_THE), device=q_THE.device)
        distance_TT = place_T[:, None] - place_T
        mask_TT = (distance_TT >= 0) & (distance_TT < window)
    out_HTE = functional.scaled_dot_product_attention(
        q_THE.transpose(0, 1)[None],
        k_TGE.transpose(0, 1)[None],
        v_TGE.transpose(0, 1)[None],
        attn_mask=mask_TT,
        is_causal=mask_TT is None,
        enable_gqa=q_THE.shape[1] != k_TGE.shape[1],
    )
    return out_HTE[0].transpose(0, 1)


class ChainAttention:
    """The `attend` of slots 1..K-1: context before the anchor, and the chain so far.

    Each call is one slot of all blocks and adds its keys and values to the chain.
    """

    def __init__(
        self, context_kv: tuple[Tensor, Tensor], blocks: PackedBlocks, *, window: int | None
    ) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._window = window
        self._blocks = blocks
        lengths = list(blocks.context_lengths)
        self._context = list(zip(*(torch.split(x, lengths) for x in context_kv), strict=True))

    def __call__(self, _layer: int, q_AHE: Tensor, k_AGE: Tensor, v_AGE: Tensor) -> Tensor:
        """[A, H, E] queries, keys and values of this slot to [A, H, E]."""
        self._keys.append(k_AGE)
        self._values.append(v_AGE)
        num_blocks, num_heads, width = q_AHE.shape
        groups = k_AGE.shape[1]
        scaled_AHE = q_AHE * (1.0 / math.sqrt(width))
        q_AGXE = scaled_AHE.view(num_blocks, groups, num_heads // groups, width)
        keys_AGJE = torch.stack(self._keys, dim=2)
        values_AGJE = torch.stack(self._values, dim=2)
        own_AGXJ = q_AGXE @ keys_AGJE.transpose(2, 3)
        if self._window is not None:  # the oldest of the chain leave the window
            own_AGXJ[..., : max(0, len(self._keys) - self._window)] = float("-inf")
        parts = [
            torch.split(x, list(self._blocks.num_blocks))
            for x in (self._blocks.anchors_A, q_AGXE, own_AGXJ, values_AGJE)
        ]
        pieces = zip(self._context, *parts, strict=True)
        return torch.cat([self._one(*context, *piece) for context, *piece in pieces])

    def _one(
        self,
        k_TGE: Tensor,
        v_TGE: Tensor,
        anchors_R: Tensor,
        q_RGXE: Tensor,
        own_RGXJ: Tensor,
        values_RGJE: Tensor,
    ) -> Tensor:
        """The blocks of one sequence: one softmax over its context and each one's own chain."""
        num_blocks, groups, share, width = q_RGXE.shape
        q_GYE = q_RGXE.transpose(0, 1).reshape(groups, num_blocks * share, width)
        bias_RT = self._bias(anchors_R, len(k_TGE), q_RGXE.dtype)
        bias_1YT = bias_RT.repeat_interleave(share, dim=0)[None]
        scores_GYT = torch.baddbmm(bias_1YT, q_GYE, k_TGE.permute(1, 2, 0))
        scores_RGXT = scores_GYT.view(groups, num_blocks, share, -1).transpose(0, 1)
        both = torch.cat((scores_RGXT, own_RGXJ), dim=3).softmax(dim=3)
        weights_RGXT, weights_RGXJ = both[..., : len(k_TGE)], both[..., len(k_TGE) :]
        flat_GYT = weights_RGXT.transpose(0, 1).reshape(groups, num_blocks * share, -1)
        from_context = torch.bmm(flat_GYT, v_TGE.transpose(0, 1))
        out_RGXE = from_context.view(groups, num_blocks, share, width).transpose(0, 1)
        out_RGXE = out_RGXE + weights_RGXJ @ values_RGJE
        return out_RGXE.reshape(num_blocks, groups * share, width)

    def _bias(self, anchors_R: Tensor, num_context: int, dtype: torch.dtype) -> Tensor:
        """0 where a block sees a context position, -inf elsewhere: [R, T]."""
        position_T = torch.arange(num_context, device=anchors_R.device)
        is_hidden_RT = position_T >= anchors_R[:, None]
        if self._window is not None:
            own_position_R1 = (anchors_R + len(self._keys) - 1)[:, None]
            is_hidden_RT |= position_T <= own_position_R1 - self._window
        bias_RT = torch.zeros(is_hidden_RT.shape, dtype=dtype, device=anchors_R.device)
        return bias_RT.masked_fill(is_hidden_RT, float("-inf"))
