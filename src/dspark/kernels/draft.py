"""A drafter around its backbone: its context is fed, a block is begun and walked.

It knows weights and pages, no request. References: `Drafter.context` and `Drafter.context_kv`
for the context, `engine.draft_pass` with `algorithms` for the walk. Letters: see `dspark.core`,
and r for the rank of the sequential head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dspark.kernels import extension
from dspark.kernels.linear import PackedLinear
from dspark.kernels.rounds import RoundTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWeights:
    """What turns taps into keys and values; every product is compiled (`kernels.linear`).

    `projections`: fc, then the joined product of keys and values of each layer. `norms`: of the
    context [D], then of the keys of each layer [E].
    """

    projections: Sequence[PackedLinear]
    norms: Sequence[Tensor]
    eps: float


def feed_context(
    weights: ContextWeights,
    taps_NM: Tensor,
    *,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    cos_PE: Tensor,
    sin_PE: Tensor,
    positions_N: Tensor,
    places_N: Tensor,
) -> None:
    """Write the context's keys (normed, rotated) and values into each layer's pages at `places_N`.

    `taps_NM` in the dtype of the norms and of the pages; `cos_PE`, `sin_PE`: float32 tables whose
    row is the position.
    """
    torch.ops.dspark.feed_context(
        taps_NM,
        [part for projection in weights.projections for part in projection.parts],
        weights.norms,
        weights.eps,
        keys,
        values,
        cos_PE,
        sin_PE,
        positions_N,
        places_N,
    )


def block_inputs(
    embed_weight_VD: Tensor, anchor_ids_R: Tensor, *, mask_id: int, block_size: int
) -> Tensor:
    """Embeddings [R * K, D] of `[anchor, mask, .., mask]` for each row, flattened."""
    if extension.IS_LOADED and embed_weight_VD.device.type == "cpu":
        x_ND: Tensor = torch.ops.dspark.block_inputs(
            embed_weight_VD, anchor_ids_R, mask_id, block_size
        )
        return x_ND
    ids_RK = anchor_ids_R.new_full((len(anchor_ids_R), block_size), mask_id)
    ids_RK[:, 0] = anchor_ids_R
    return functional.embedding(ids_RK.view(-1), embed_weight_VD)


HEAD_KINDS = ("vanilla", "gated", "rnn")
"""Names of the sequential heads that a walk knows, by the operator's number of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkWeights:
    """LM head over S columns and the sequential head, if there is one.

    `joint`: of a gated head from [hidden; e] to its gate, of an rnn head from [state; e; hidden]
    to gate, candidate and output; e is the embedded previous token.

    `confidence`: float32 weights of the hidden state [D], then those of the previous token [r]
    if it is read, then the bias; `None` without the head, whose place the odds of the likeliest
    token take (`algorithms.confidence`).
    """

    head: PackedLinear
    w1_Vr: Tensor | None
    w2: PackedLinear | None
    kind: str = HEAD_KINDS[0]
    joint: PackedLinear | None = None
    confidence: Tensor | None


def walk(
    weights: WalkWeights,
    hidden_ND: Tensor,
    *,
    block_size: int,
    rounds: RoundTable,
    d2t_S: Tensor | None,
    probs_RKS: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Left to right over each request's `block_size` rows of `hidden_ND` (Eq. 4).

    Returns target ids int64 [R, K] and confidence logits float32 [R, K]. `probs_RKS` is float32
    memory for the distributions of requests with maximal coupling; other rows stay as they are.
    `None` if a score is not finite: the reference says what is wrong.
    """
    tokens_RK, confidence_RK, is_finite = torch.ops.dspark.walk(
        hidden_ND,
        block_size,
        weights.head.parts,
        weights.head.out_features,
        weights.w1_Vr,
        weights.w2.parts if weights.w2 is not None else [],
        HEAD_KINDS.index(weights.kind),
        weights.joint.parts if weights.joint is not None else [],
        weights.confidence,
        rounds.counters_CR,
        rounds.options_OR,
        d2t_S,
        probs_RKS,
    )
    if not is_finite:
        return None
    return tokens_RK, confidence_RK
