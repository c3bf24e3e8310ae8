"""One pass of a drafter over a batch: its loss, and what the slots say about acceptance.

It changes no weights and reads no file; the maths of the loss is in algorithms/losses.py.

Letters: A blocks, K block_size, T context rows, N supervised slots, S draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dspark.algorithms import anchors, losses
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.models.drafter import Drafter
from dspark.models.packed_attention import PackedBlocks
from dspark.training.block_attention import block_attention

LogSumExp = Callable[[Tensor], Tensor]
"""Last hidden states [N, D] to the log-sum-exp of their full-vocabulary logits, float32 [N]."""


class Batch(Protocol):
    """What one pass reads; `data.batches.Batch` has it.

    `taps_TM` holds the contexts of all sequences; `rows_N` are the supervised slots among the
    A * K flattened ones, and `last_ND`, `lse_N` belong to those rows only.
    """

    @property
    def taps_TM(self) -> Tensor: ...
    @property
    def blocks(self) -> PackedBlocks: ...
    @property
    def previous_AK(self) -> Tensor: ...
    @property
    def labels_AK(self) -> Tensor: ...
    @property
    def valid_AK(self) -> Tensor: ...
    @property
    def rows_N(self) -> Tensor: ...
    @property
    def last_ND(self) -> Tensor: ...
    @property
    def lse_N(self) -> Tensor | None: ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """The supervised slots inside the drafter: hidden [N, D], w2's input and W1's rows [N, r]."""

    hidden_ND: Tensor
    state_Nr: Tensor | None
    embedded_Nr: Tensor | None


def weight_sum(batch: Batch, *, loss_decay: float) -> float:
    """Sum of position weights of a batch; the normaliser adds those of all micro-batches."""
    return float(anchors.position_weights(batch.valid_AK, loss_decay=loss_decay).sum())


class Objective:
    """Eq. 12 for one drafter; holds the vocabulary map and the (maybe compiled) chunk kernel."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        config: ObjectiveConfig,
        target_head: TargetHead,
        kernel: losses.ChunkKernel = losses.chunk_terms,
    ) -> None:
        self.drafter = drafter
        self.config = config
        self._target_head = target_head
        self._kernel = kernel
        self._vocabulary: DraftVocabulary | None = None
        if drafter.d2t_S is not None:
            vocab_size = drafter.config.vocab_size
            self._vocabulary = DraftVocabulary.of(drafter.d2t_S, vocab_size=vocab_size)

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
        if self.drafter.confidence_head is not None and config.weights.confidence > 0:
            assert head.acceptance_N is not None
            confidence_N = self._confidence(slots)
            term = losses.confidence_loss(confidence_N, head.acceptance_N, weights_N=weights_N)
            loss = loss + config.weights.confidence * term
        return Outcome(loss=loss, rows_N=batch.rows_N, head=head, confidence_N=confidence_N)

    def _slots(self, batch: Batch, input_scale_M: Tensor | None) -> _Slots:
        drafter, blocks, previous_AK = self.drafter, batch.blocks, batch.previous_AK
        taps_TM = batch.taps_TM.to(drafter.dtype)
        if input_scale_M is not None:
            taps_TM = taps_TM * input_scale_M.to(drafter.dtype)
        context_TD = drafter.context(taps_TM)
        context_kv = drafter.context_kv(context_TD, blocks.context_positions_T)
        attend = block_attention(context_kv, blocks, windows=drafter.config.windows)
        inputs_ND = drafter.block_inputs(previous_AK[:, 0])
        hidden_ND = drafter.backbone(inputs_ND, blocks.positions_N, attend)
        state_Nr = embedded_Nr = None
        if drafter.markov_head is not None:
            hidden_AKD = hidden_ND.view(*previous_AK.shape, -1)
            state_AKr = drafter.markov_head.unroll_features(previous_AK, hidden_AKD)
            state_Nr = state_AKr.flatten(0, 1)[batch.rows_N]
            embedded_Nr = drafter.markov_head.embed(previous_AK).flatten(0, 1)[batch.rows_N]
        return _Slots(hidden_ND=hidden_ND[batch.rows_N], state_Nr=state_Nr, embedded_Nr=embedded_Nr)

    def _draft_logits(self, slots: _Slots) -> losses.DraftLogits:
        head_SD, markov = self.drafter.head_weight_SD, self.drafter.markov_head
        return losses.DraftLogits(
            hidden_ND=slots.hidden_ND.to(head_SD.dtype),
            head_SD=head_SD,
            state_Nr=None if slots.state_Nr is None else slots.state_Nr.to(head_SD.dtype),
            w2_Sr=None if markov is None else markov.markov_w2.weight.to(head_SD.dtype),
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
            last_ND=batch.last_ND.to(self.drafter.head_weight_SD.dtype),
            lse_N=lse_N,
            scale=how.scale,
            softcap=how.softcap,
        )

    def _confidence(self, slots: _Slots) -> Tensor:
        head = self.drafter.confidence_head
        assert head is not None
        hidden_ND = slots.hidden_ND
        embedded_Nr = slots.embedded_Nr if head.rank > 0 else None
        if self.config.stop_gradient:
            hidden_ND = hidden_ND.detach()
            embedded_Nr = None if embedded_Nr is None else embedded_Nr.detach()
        logits_N: Tensor = head(hidden_ND, embedded_Nr)
        return logits_N
