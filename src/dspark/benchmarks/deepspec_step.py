"""DeepSpec's training step written down straight, as a reference to measure against.

One sample at a time, always 512 blocks (most of them empty on short texts), logits of all slots
at once, both distributions twice (for the acceptance, with a graph, and for the loss), autograd
through all of it. Sources: sections 3.1-3.3 of the notes on DeepSpec; its attention is given our
block attention, which is faster than a dense mask. It shares no code with the trainer's loss.

Letters: A blocks, K block_size, V vocabulary, T tokens of the sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dspark.models.drafter import Drafter
from dspark.models.packed_attention import PackedBlocks
from dspark.training.block_attention import block_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence: its tokens, which of them are supervised, its states, and its anchors."""

    ids_T: Tensor
    loss_mask_T: Tensor
    taps_TM: Tensor
    last_TD: Tensor
    anchors_R: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Padded:
    """Blocks filled up to A with empty ones at position 0."""

    anchors_A: Tensor
    position_AK: Tensor
    previous_AK: Tensor
    label_AK: Tensor
    valid_AK: Tensor


def sample_loss(
    drafter: Drafter,
    sample: Sample,
    *,
    normaliser: float,
    num_anchors: int = 512,
    loss_decay: float = 4.0,
) -> Tensor:
    """0.1 CE + 0.9 L1 + 1.0 BCE, each weighted by exp(-j/4), over `normaliser`."""
    padded = _padded(sample, drafter.config.block_size, num_anchors)
    hidden_ND = _hidden(drafter, sample, padded)
    head_VD, markov = drafter.head_weight_SD, drafter.markov_head
    logits_NV = functional.linear(hidden_ND, head_VD)
    embedded_Nr = None
    if markov is not None:
        hidden_AKD = hidden_ND.view(*padded.previous_AK.shape, -1)
        logits_NV = logits_NV + markov.unroll(padded.previous_AK, hidden_AKD).flatten(0, 1)
        embedded_Nr = markov.embed(padded.previous_AK).flatten(0, 1)
    with torch.no_grad():
        target_NV = functional.linear(sample.last_TD[padded.position_AK.view(-1)], head_VD)
    accept_N = 1.0 - 0.5 * _distance(logits_NV, target_NV)
    l1_N = _distance(logits_NV, target_NV)
    ce_N = functional.cross_entropy(logits_NV, padded.label_AK.view(-1), reduction="none").float()
    slot_K = torch.arange(padded.valid_AK.shape[1], device=logits_NV.device)
    weight_N = (padded.valid_AK * torch.exp(-slot_K / loss_decay)).view(-1) / normaliser
    loss = (weight_N * (0.1 * ce_N + 0.9 * l1_N)).sum()
    confidence = drafter.confidence_head
    if confidence is not None:
        logit_N = confidence(hidden_ND, embedded_Nr if confidence.rank > 0 else None)
        aim_N = accept_N.detach().clamp(0.0, 1.0)
        bce_N = functional.binary_cross_entropy_with_logits(logit_N, aim_N, reduction="none")
        loss = loss + (weight_N * bce_N).sum()
    return loss


def _distance(draft_NV: Tensor, target_NV: Tensor) -> Tensor:
    draft = draft_NV.float().softmax(dim=-1)
    target = target_NV.float().softmax(dim=-1)
    return (draft - target).abs().sum(dim=-1)


def _padded(sample: Sample, block_size: int, num_anchors: int) -> _Padded:
    count, length = len(sample.anchors_R), len(sample.ids_T)
    anchors_A = sample.anchors_R.new_zeros(num_anchors)
    anchors_A[:count] = sample.anchors_R
    offset_K = torch.arange(block_size)
    position_AK = anchors_A[:, None] + offset_K
    label_at_AK = position_AK + 1
    inside_AK = (label_at_AK < length) & sample.loss_mask_T[label_at_AK.clamp(max=length - 1)]
    keep_A = torch.arange(num_anchors) < count
    valid_AK = inside_AK.long().cumprod(dim=1).bool() & keep_A[:, None]
    return _Padded(
        anchors_A=anchors_A,
        position_AK=position_AK.clamp(max=length - 1),
        previous_AK=sample.ids_T[position_AK.clamp(max=length - 1)],
        label_AK=sample.ids_T[label_at_AK.clamp(max=length - 1)],
        valid_AK=valid_AK,
    )


def _hidden(drafter: Drafter, sample: Sample, padded: _Padded) -> Tensor:
    length = len(sample.ids_T)
    blocks = PackedBlocks(
        context_lengths=[length],
        num_blocks=[len(padded.anchors_A)],
        anchors_A=padded.anchors_A,
        block_size=padded.valid_AK.shape[1],
    )
    context_kv = drafter.context_kv(drafter.context(sample.taps_TM), torch.arange(length))
    attend = block_attention(context_kv, blocks, windows=drafter.config.windows)
    inputs_ND = drafter.block_inputs(padded.previous_AK[:, 0])
    return drafter.backbone(inputs_ND, blocks.positions_N, attend)
