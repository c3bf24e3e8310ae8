"""A whole drafting round of a drafter as one call: `DraftRound`. CPU and C++ path only.

It knows weights and pages, no request. Its bits are those of `feed_context`, the fused stack and
`walk` called one after the other, which are its reference; letters as in `kernels.draft`. One
parallel region serves all three: a round of one request is fifty pieces of work, most of them
shorter than it takes to wake a thread or to go from Python to an operator.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels.draft import HEAD_KINDS, ContextWeights, WalkWeights
from dspark.kernels.rounds import RoundTable
from dspark.kernels.stack import StackPages


class WaitingTokens(NamedTuple):
    """Tokens that enter the context: taps in its dtype, positions, places in the pages."""

    taps_NM: Tensor
    positions_N: Tensor
    places_N: Tensor


class DraftRound:
    """The weights and pages of one drafter, in use as they lie; scratch memory is kept."""

    def __init__(
        self,
        *,
        context: ContextWeights,
        pages: StackPages,
        walk: WalkWeights,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        embed_weight_VD: Tensor,
        mask_id: int,
        block_size: int,
        d2t_S: Tensor | None,
    ) -> None:
        """`pages`: `keys` and `values` of each layer, bound to the stack of the layers. `mask_id`:
        what a block holds after its anchor.

        Raises `RuntimeError` where the parts do not fit each other.
        """
        self._run = torch.classes.dspark.DraftRound(
            pages.bound,
            [part for projection in context.projections for part in projection.parts],
            list(context.norms),
            context.eps,
            list(keys),
            list(values),
            embed_weight_VD.detach(),
            mask_id,
            block_size,
            walk.head.parts,
            walk.head.out_features,
            walk.w1_Vr,
            walk.w2.parts if walk.w2 is not None else [],
            HEAD_KINDS.index(walk.kind),
            walk.joint.parts if walk.joint is not None else [],
            walk.confidence,
            d2t_S,
        ).run

    def run(
        self,
        waiting: Sequence[WaitingTokens],
        *,
        cos_PE: Tensor,
        sin_PE: Tensor,
        table_RP: Tensor,
        rows: Sequence[int],
        rounds: RoundTable,
        probs_RKS: Tensor | None,
        forbidden: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor] | None:
        """Feed `waiting`, then a block of each request: what `walk` returns.

        `cos_PE`, `sin_PE`: float32 tables whose row is the position. `table_RP`: int32 pages by
        position, of which request r has row `rows[r]`. A block starts at the anchor's position,
        one before `rounds` says that the first drafted token stands. Tokens of `waiting` stand at
        different places. `forbidden`: slots (r * K + j) and columns of the draft vocabulary in
        turn, the slots in order; such a column has a logit of minus infinity. The context is fed
        even where the result is `None`.
        """
        tokens_RK, confidence_RK, is_finite = self._run(
            [tokens.taps_NM for tokens in waiting],
            [tokens.positions_N for tokens in waiting],
            [tokens.places_N for tokens in waiting],
            cos_PE,
            sin_PE,
            table_RP,
            rows,
            rounds.flat_counters,
            rounds.flat_options,
            probs_RKS,
            forbidden,
        )
        if not is_finite:
            return None
        return tokens_RK, confidence_RK
