"""One pass of a drafter over a batch: its loss, and what the slots say about acceptance.

It changes no weights and reads no file; the maths of the loss is in algorithms/losses.py.

Letters: A blocks, K block_size, T context rows, N supervised slots, S draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.algorithms import anchors, losses
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.training.slot_pass import Batch, SlotPass, Slots

LogSumExp = Callable[[Tensor], Tensor]
"""Last hidden states [N, D] to the log-sum-exp of their full-vocabulary logits, float32 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised."""

    weights: losses.LossWeights = losses.LossWeights()  # noqa: RUF009  # frozen
    loss_decay: float = 4.0
    """Position weight exp(-(k - 1) / loss_decay)."""
    stop_gradient: bool = False
    """The confidence term trains its own head only, not the backbone (UC-109)."""
    chunk_rows: int = 512
    """Slots whose probabilities exist at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHead:
    """How the target turns LM-head products into logits, and their log-sum-exp if not cached."""

    scale: float = 1.0
    softcap: float | None = None
    log_sum_exp: LogSumExp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Values of one batch. `loss` carries the gradient; rows are the batch's supervised slots."""

    loss: Tensor
    rows_N: Tensor
    head: losses.HeadLoss
    confidence_N: Tensor | None

    def acceptance_by_slot(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Sum of acceptance and number of rows for each slot 1..K, float64 [K] each."""
        assert self.head.acceptance_N is not None
        slot_N = (self.rows_N % block_size).cpu()
        ones_N = torch.ones_like(slot_N, dtype=torch.float64)
        accepted_N = self.head.acceptance_N.double().cpu()
        return (
            torch.zeros(block_size, dtype=torch.float64).index_add_(0, slot_N, accepted_N),
            torch.zeros(block_size, dtype=torch.float64).index_add_(0, slot_N, ones_N),
        )


def weight_sum(batch: Batch, *, loss_decay: float) -> float:
    """Sum of position weights of a batch; the normaliser adds those of all micro-batches."""
    return float(anchors.position_weights(batch.valid_AK, loss_decay=loss_decay).sum())


class Objective:
    """Eq. 12 for one drafter; holds the vocabulary map and the (maybe compiled) chunk kernel."""

    def __init__(
        self,
        slot_pass: SlotPass,
        *,
        config: ObjectiveConfig,
        target_head: TargetHead,
        kernel: losses.ChunkKernel = losses.chunk_terms,
    ) -> None:
        self.slot_pass = slot_pass
        self.config = config
        self._target_head = target_head
        self._kernel = kernel
        self._vocabulary: DraftVocabulary | None = None
        if slot_pass.d2t_S is not None:
            vocab_size = slot_pass.sizes.vocab_size
            self._vocabulary = DraftVocabulary.of(slot_pass.d2t_S, vocab_size=vocab_size)

    def __call__(
        self,
        batch: Batch,
        *,
        normaliser: float,
        input_scale_M: Tensor | None,
        has_agreement: bool = False,
    ) -> Outcome:
        """Loss of `batch` divided by `normaliser`, the global sum of weights."""
        config, slots = self.config, self._slots(batch, input_scale_M)
        weights_AK = anchors.position_weights(batch.valid_AK, loss_decay=config.loss_decay)
        weights_N = weights_AK.flatten()[batch.rows_N] / normaliser
        head = losses.head_loss(
            self._draft_logits(slots),
            target=self._target(batch),
            labels=self._labels(batch),
            weights_N=weights_N,
            weights=config.weights,
            chunk_rows=config.chunk_rows,
            kernel=self._kernel,
            has_agreement=has_agreement,
        )
        loss, confidence_N = head.total, None
        if self.slot_pass.has_confidence and config.weights.confidence > 0:
            assert head.acceptance_N is not None
            confidence_N = self.slot_pass.confidence(slots, stop_gradient=config.stop_gradient)
            term = losses.confidence_loss(confidence_N, head.acceptance_N, weights_N=weights_N)
            loss = loss + config.weights.confidence * term
        return Outcome(loss=loss, rows_N=batch.rows_N, head=head, confidence_N=confidence_N)

    def _slots(self, batch: Batch, input_scale_M: Tensor | None) -> Slots:
        dtype = self.slot_pass.dtype
        taps_TM = batch.taps_TM.to(dtype)
        if input_scale_M is not None:
            taps_TM = taps_TM * input_scale_M.to(dtype)
        return self.slot_pass.slots(batch, taps_TM)

    def _draft_logits(self, slots: Slots) -> losses.DraftLogits:
        head_SD = self.slot_pass.head_weight_SD
        return losses.DraftLogits(
            hidden_ND=slots.hidden_ND.to(head_SD.dtype),
            head_SD=head_SD,
            state_Nr=None if slots.state_Nr is None else slots.state_Nr.to(head_SD.dtype),
            w2_Sr=None if slots.w2_Sr is None else slots.w2_Sr.to(head_SD.dtype),
        )

    def _labels(self, batch: Batch) -> losses.Labels:
        label_N = batch.labels_AK.flatten()[batch.rows_N]
        if self._vocabulary is None:
            return losses.Labels(
                index_N=label_N, inside_N=torch.ones_like(label_N, dtype=torch.bool)
            )
        column_N = self._vocabulary.column_V[label_N]
        is_inside_N = column_N < self._vocabulary.size
        return losses.Labels(index_N=torch.where(is_inside_N, column_N, 0), inside_N=is_inside_N)

    def _target(self, batch: Batch) -> losses.TargetRows | None:
        if not self.config.weights.needs_target:
            return None
        how, lse_N = self._target_head, batch.lse_N
        if lse_N is None and how.log_sum_exp is not None:
            lse_N = how.log_sum_exp(batch.last_ND)
        return losses.TargetRows(
            last_ND=batch.last_ND.to(self.slot_pass.head_weight_SD.dtype),
            lse_N=lse_N,
            scale=how.scale,
            softcap=how.softcap,
        )
