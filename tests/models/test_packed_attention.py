"""Training's packed blocks against one block at a time."""

import pytest
import torch

from dspark.kernels.attention import attention
from dspark.models.drafter import Drafter
from dspark.models.packed_attention import PackedBlocks, packed_attention, visible_keys
from tests.models.toy_drafters import random_taps, serve_block, toy_drafter

LENGTHS = (13, 1, 9)
ANCHORS = ((1, 2, 6, 13), (0, 1), (0, 5))
ANCHOR_IDS = torch.tensor([3, 9, 1, 30, 2, 7, 11, 5])
WINDOWS = pytest.mark.parametrize("windows", [(None, None), (6, None), (6, 3)])


def packed_hidden(drafter: Drafter, taps: list[torch.Tensor]) -> torch.Tensor:
    blocks = PackedBlocks(
        context_lengths=LENGTHS,
        num_blocks=[len(anchors) for anchors in ANCHORS],
        anchors_A=torch.tensor([anchor for anchors in ANCHORS for anchor in anchors]),
        block_size=drafter.config.block_size,
    )
    ctx_TD = drafter.context(torch.cat(taps))
    context_kv = drafter.context_kv(ctx_TD, blocks.context_positions_T)
    attend = packed_attention(context_kv, blocks, windows=drafter.config.windows)
    return drafter.backbone(drafter.block_inputs(ANCHOR_IDS), blocks.positions_N, attend)


@WINDOWS
def test_packed_blocks_equal_one_block_at_a_time(windows):
    """UC-063, UC-071, UC-072, UC-114: anchors 0, 1, 2, mid, last of three packed sequences."""
    drafter = toy_drafter(layer_windows=windows)
    taps = [random_taps(drafter, length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [
        serve_block(drafter, taps_TM, int(anchor_id), anchor)
        for anchor_id, (taps_TM, anchor) in zip(
            ANCHOR_IDS,
            [(taps[row], anchor) for row, anchors in enumerate(ANCHORS) for anchor in anchors],
            strict=True,
        )
    ]
    torch.testing.assert_close(
        packed_hidden(drafter, taps), torch.cat(expected), rtol=1e-5, atol=1e-5
    )


@WINDOWS
def test_gradients_equal_one_block_at_a_time(windows):
    drafter = toy_drafter(layer_windows=windows)
    taps = [random_taps(drafter, length, seed) for seed, length in enumerate(LENGTHS)]
    drafter.base_logits(packed_hidden(drafter, taps)).square().mean().backward()
    packed = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    row_of_block = [row for row, anchors in enumerate(ANCHORS) for _ in anchors]
    anchors = [anchor for anchors in ANCHORS for anchor in anchors]
    hidden = [
        serve_block(drafter, taps[row], int(anchor_id), anchor)
        for row, anchor, anchor_id in zip(row_of_block, anchors, ANCHOR_IDS, strict=True)
    ]
    drafter.base_logits(torch.cat(hidden)).square().mean().backward()
    assert packed.keys() == {n for n, p in drafter.named_parameters() if p.grad is not None}
    for name, parameter in drafter.named_parameters():
        if name in packed:
            torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_bf16_is_differentiable_and_close_to_fp32():
    drafter = toy_drafter()
    taps = [random_taps(drafter, length, seed) for seed, length in enumerate(LENGTHS)]
    exact = packed_hidden(drafter, taps).detach()
    hidden = packed_hidden(drafter.to(torch.bfloat16), taps)
    hidden.float().square().mean().backward()
    assert hidden.dtype is torch.bfloat16
    assert all(bool(p.grad.isfinite().all()) for p in drafter.layers.parameters())
    assert ((hidden.float() - exact).norm() / exact.norm()) < 0.05


def test_a_block_sees_only_its_own_context_and_slots():
    """UC-072: the rule, written out for one small sequence."""
    visible = visible_keys(torch.tensor([0, 2]), context_length=3, block_size=2, window=None)
    assert visible.int().tolist() == [
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1],
        [1, 1, 0, 0, 0, 1, 1],
    ]


def test_each_slot_has_its_own_window():
    """UC-071: block 4, window 6, prefix 20: the row of a slot, not the last row's for all."""
    visible = visible_keys(torch.tensor([20]), context_length=20, block_size=4, window=6)
    seen = [[key for key in range(24) if row[key]] for row in visible]
    assert seen == [list(range(15 + slot, 24)) for slot in range(4)]


@WINDOWS
def test_packed_blocks_equal_the_paged_attention_of_serving(windows):
    """UC-063, UC-070, UC-072: the operator that serves draws the same picture as training."""
    drafter, page_size = toy_drafter(layer_windows=windows), 4
    taps = [random_taps(drafter, length, seed) for seed, length in enumerate(LENGTHS)]
    trained_NKD = packed_hidden(drafter, taps).unflatten(0, (-1, drafter.config.block_size))
    last = [anchors[-1] for anchors in ANCHORS]  # one live block a request, as when serving
    rows = [sum(map(len, ANCHORS[: row + 1])) - 1 for row in range(len(ANCHORS))]

    num_slots = drafter.config.block_size
    positions_N = torch.cat([anchor + torch.arange(num_slots) for anchor in last])
    tables_RP = torch.arange(3 * 5, dtype=torch.int32).flip(0).view(3, 5)
    pages = [torch.zeros(2, 15, 2, page_size, 8) for _ in windows]  # keys and values of a layer

    def slots(request: int, positions: torch.Tensor) -> torch.Tensor:
        return tables_RP[request].long()[positions // page_size] * page_size + positions % page_size

    for request, (taps_TM, anchor) in enumerate(zip(taps, last, strict=True)):
        at_T = torch.arange(anchor)
        context_kv = drafter.context_kv(drafter.context(taps_TM[:anchor]), at_T)
        slots_T = slots(request, at_T)
        for layer, (k_TGE, v_TGE) in enumerate(context_kv):
            pages[layer][0][slots_T // page_size, :, slots_T % page_size] = k_TGE.detach()
            pages[layer][1][slots_T // page_size, :, slots_T % page_size] = v_TGE.detach()

    def attend(layer, q_NHE, k_NGE, v_NGE):
        return attention(
            q_NHE,
            k_NGE,
            v_NGE,
            *pages[layer],
            tables_RP,
            torch.arange(0, 4 * num_slots, num_slots, dtype=torch.int32),
            torch.tensor(last, dtype=torch.int32).add(num_slots).repeat_interleave(num_slots),
            positions_N,
            torch.cat([slots(r, p) for r, p in enumerate(positions_N.split(num_slots))]),
            max_visible=max(last) + num_slots,
            scale=q_NHE.shape[2] ** -0.5,
            window=windows[layer],
        )

    with torch.inference_mode():
        served_ND = drafter.backbone(drafter.block_inputs(ANCHOR_IDS[rows]), positions_N, attend)
    torch.testing.assert_close(served_ND, trained_NKD[rows].flatten(0, 1), rtol=1e-4, atol=1e-4)
