"""Tiny drafters and a dense reference of who sees whom, for the tests of this folder."""

from dataclasses import replace

import torch
from torch import Tensor

from dspark.models.drafter import Attend, Drafter, DrafterConfig

CONFIG = DrafterConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=10000.0,
    num_target_layers=4,
    target_layer_ids=(0, 1, 3),
    block_size=4,
    mask_token_id=39,
    markov_rank=6,
)


def toy_tables() -> tuple[Tensor, Tensor]:
    """Embedding and LM head [V, D] of the toy target."""
    shape = (2, CONFIG.vocab_size, CONFIG.hidden_size)
    embed_weight_VD, head_weight_VD = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return embed_weight_VD, head_weight_VD


def toy_drafter(seed: int = 0, *, d2t_S: Tensor | None = None, **changes) -> Drafter:
    """A drafter with weights large enough that every part of it matters to the logits."""
    config = replace(CONFIG, confidence_head_with_markov=None, **changes)
    generator = torch.Generator().manual_seed(seed)
    embed_weight_VD, head_weight_VD = toy_tables()
    drafter = Drafter(
        config,
        embed_weight_VD=embed_weight_VD,
        head_weight_VD=head_weight_VD,
        d2t_S=d2t_S,
        generator=generator,
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter


def dense_block_attention(
    context_kv: list[tuple[Tensor, Tensor]], *, anchor: int, windows: tuple[int | None, ...]
) -> Attend:
    """Serving's rule for ONE block over its context 0..anchor-1, written out with loops."""

    def attend(layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        k_CGE = torch.cat((context_kv[layer][0][:anchor], k_NGE))
        v_CGE = torch.cat((context_kv[layer][1][:anchor], v_NGE))
        window = windows[layer]
        repeats = q_NHE.shape[1] // k_NGE.shape[1]
        out_NHE = torch.empty_like(q_NHE)
        for slot in range(len(q_NHE)):
            low = 0 if window is None else max(0, anchor + slot + 1 - window)
            for head in range(q_NHE.shape[1]):
                keys_CE, values_CE = (x[low:, head // repeats].float() for x in (k_CGE, v_CGE))
                scores_C = keys_CE @ q_NHE[slot, head].float() / q_NHE.shape[2] ** 0.5
                out_NHE[slot, head] = scores_C.softmax(0) @ values_CE
        return out_NHE

    return attend


def serve_block(drafter: Drafter, taps_TM: Tensor, anchor_id: int, anchor: int) -> Tensor:
    """Hidden states [K, D] of the block at `anchor`, seeing taps 0..anchor-1 only."""
    positions_T = torch.arange(anchor)
    context_kv = drafter.context_kv(drafter.context(taps_TM[:anchor]), positions_T)
    attend = dense_block_attention(context_kv, anchor=anchor, windows=drafter.config.windows)
    x_KD = drafter.block_inputs(torch.tensor([anchor_id]))
    return drafter.backbone(x_KD, anchor + torch.arange(drafter.config.block_size), attend)


def random_taps(drafter: Drafter, length: int, seed: int = 1) -> Tensor:
    """Taps [length, M] of a sequence that never was."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, drafter.config.taps_size, generator=generator)
