"""A packed drafter's weights as the operators of `kernels.draft` and `kernels.stack` take them.

Each function answers `None` where an operator does not fit: nothing packed, or no C++ path. Then
the drafter's own modules run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.kernels.draft import ContextWeights, WalkWeights
from dspark.kernels.draft_round import DraftRound
from dspark.kernels.linear import PackedLinear
from dspark.kernels.stack import FusedStack, Norm, StackLayer, StackPages
from dspark.models.drafter import Drafter, DrafterLayer, RMSNorm
from dspark.models.heads import SequentialKind


def context_weights(drafter: Drafter) -> ContextWeights | None:
    """What feeds the drafter's context."""
    if drafter.fusion is not None:
        return None
    layers = [layer.self_attn for layer in drafter.decoder_layers()]
    projections: list[object] = [drafter.fc, *(attention.kv_proj for attention in layers)]
    packed = [p for p in projections if isinstance(p, PackedLinear) and p.is_compiled]
    if len(packed) != len(projections) or drafter.config.head_dim % 2:
        return None
    key_norms = [attention.k_norm for attention in layers if attention.k_norm is not None]
    if len(key_norms) != len(layers):
        return None
    norms = [drafter.hidden_norm.weight, *(norm.weight for norm in key_norms)]
    return ContextWeights(
        projections=packed,
        norms=[norm.detach() for norm in norms],
        eps=drafter.config.rms_norm_eps,
    )


def backbone_stack(drafter: Drafter) -> FusedStack | None:
    """All layers and the final norm as one call."""
    layers = []
    for layer, window in zip(drafter.decoder_layers(), drafter.config.windows, strict=True):
        products = _products(layer)
        if products is None:
            return None
        query, keys_values, out, gate_up, down = products
        attention, config = layer.self_attn, drafter.config
        head_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            head_norms = _norm(attention.q_norm), _norm(attention.k_norm)
        layers.append(
            StackLayer(
                norm_in=_norm(layer.input_layernorm),
                norm_mid=_norm(layer.post_attention_layernorm),
                head_norms=head_norms,
                heads=[query, keys_values],
                out=out,
                gate_up=gate_up,
                down=down,
                head_dim=config.head_dim,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                scale=config.head_dim**-0.5,
                window=window,
            )
        )
    return FusedStack(layers, final_norm=_norm(drafter.norm))


def walk_weights(drafter: Drafter) -> WalkWeights | None:
    """What a block is walked with: any sequential head, or none."""
    head, markov = drafter.packed_head, drafter.markov_head
    if not isinstance(head, PackedLinear) or not head.is_compiled or head.bias is not None:
        return None
    if drafter.head_weight_SD.dtype != drafter.dtype:
        return None
    if markov is None:
        return WalkWeights(head=head, w1_Vr=None, w2=None, confidence=_confidence(drafter))
    parts = [markov.markov_w2]
    if markov.kind is SequentialKind.GATED:
        parts.append(markov.gate_proj)
    if markov.kind is SequentialKind.RNN:
        parts.append(markov.joint_proj)
    packed = [p for p in map(_compiled, parts) if p is not None]
    if len(packed) != len(parts):
        return None
    return WalkWeights(
        head=head,
        w1_Vr=markov.markov_w1.weight.detach(),
        w2=packed[0],
        kind=markov.kind,
        joint=packed[1] if len(packed) > 1 else None,
        confidence=_confidence(drafter),
    )


def draft_round(
    drafter: Drafter,
    *,
    context: ContextWeights,
    walk: WalkWeights,
    pages: StackPages,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
) -> DraftRound | None:
    """Context, layers and walk as one call; `pages` are those of `backbone_stack`."""
    embeddings, mask_id = drafter.embed_weight_VD, drafter.config.mask_token_id
    assert mask_id is not None, "a configuration of this kind has one"
    if embeddings.dtype != drafter.dtype or not embeddings.is_contiguous():
        return None
    return DraftRound(
        context=context,
        pages=pages,
        walk=walk,
        keys=keys,
        values=values,
        embed_weight_VD=embeddings,
        mask_id=mask_id,
        block_size=drafter.config.block_size,
        d2t_S=drafter.d2t_S,
    )


def _compiled(module: object) -> PackedLinear | None:
    return module if isinstance(module, PackedLinear) and module.is_compiled else None


def _products(layer: DrafterLayer) -> list[PackedLinear] | None:
    """q, keys and values, output, gate and up, down; `None` unless all are compiled."""
    attention, mlp = layer.self_attn, layer.mlp
    modules: list[object] = [
        attention.q_proj,
        attention.kv_proj,
        attention.o_proj,
        mlp.gate_up_proj,
        mlp.down_proj,
    ]
    packed = [p for p in modules if isinstance(p, PackedLinear) and p.is_compiled]
    return packed if len(packed) == len(modules) else None


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight.detach(), norm.eps)


def _confidence(drafter: Drafter) -> Tensor | None:
    if drafter.confidence_head is None:
        return None
    row = drafter.confidence_head.proj
    return torch.cat([row.weight[0], row.bias]).detach().float()
