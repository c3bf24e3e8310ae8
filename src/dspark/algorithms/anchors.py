"""Which positions of an answer start a block in training, and what each block is taught.

It does not know the model, the loss, or how sequences are packed.

Letters: T tokens of one sequence, R blocks of it, K block_size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """R training blocks of one sequence; slot j of anchor a stands for position a + j.

    `previous_RK` the true token at a + j, what the sequential head is fed; `labels_RK` the true
    token at a + 1 + j; `valid_RK` whether the slot is supervised. Slots that are not supervised
    hold the sequence's last token, so that every index is legal. `ids_C` are the tokens of the
    context, up to the last anchor.
    """

    ids_C: Tensor
    anchors_R: Tensor
    positions_RK: Tensor
    previous_RK: Tensor
    labels_RK: Tensor
    valid_RK: Tensor


def candidates(loss_mask_T: Tensor) -> Tensor:
    """Positions a with a supervised token at a and at a + 1, ascending (method section 7).

    The last prompt token is never an anchor: at inference the first answer token comes from
    the target's own prefill, so no block ever starts there.
    """
    return (loss_mask_T[:-1] & loss_mask_T[1:]).nonzero().flatten()


def num_anchors(num_candidates: int, *, tokens_per_anchor: float, limit: int | None = None) -> int:
    """How many anchors a visit of a sequence draws: at least one if there is a candidate."""
    wanted = math.ceil(num_candidates / tokens_per_anchor)
    return min(wanted, num_candidates if limit is None else min(limit, num_candidates))


def choose(candidates_C: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """`count` different candidates, each subset equally likely, ascending."""
    order_C = torch.randperm(candidates_C.shape[0], generator=generator)
    return candidates_C[order_C[:count]].sort().values


def supervision(loss_mask_T: Tensor, anchors_R: Tensor, *, block_size: int) -> Tensor:
    """valid_RK: the label's position a + 1 + j is supervised and so are all earlier slots'."""
    num_tokens = loss_mask_T.shape[0]
    label_RK = anchors_R[:, None] + 1 + torch.arange(block_size)
    inside_RK = (label_RK < num_tokens) & loss_mask_T[label_RK.clamp(max=num_tokens - 1)]
    return inside_RK.long().cumprod(dim=1).bool()


def blocks(ids_T: Tensor, loss_mask_T: Tensor, anchors_R: Tensor, *, block_size: int) -> Blocks:
    """Positions, teacher-forced previous tokens, labels and supervision of each block."""
    last = ids_T.shape[0] - 1
    positions_RK = anchors_R[:, None] + torch.arange(block_size)
    return Blocks(
        ids_C=ids_T[: int(anchors_R[-1:].sum())],
        anchors_R=anchors_R,
        positions_RK=positions_RK,
        previous_RK=ids_T[positions_RK.clamp(max=last)],
        labels_RK=ids_T[(positions_RK + 1).clamp(max=last)],
        valid_RK=supervision(loss_mask_T, anchors_R, block_size=block_size),
    )
