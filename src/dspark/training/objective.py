"""One pass of a drafter over a batch: its loss, and what the slots say about acceptance.

It changes no weights and reads no file; the maths of the loss is in algorithms/losses.py.

Letters: A blocks, K block_size, T context rows, N supervised slots, S draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dspark.algorithms import losses, position_weights
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.position_weights import PositionWeights
from dspark.errors import InputError
from dspark.training.shards import local_of
from dspark.training.slot_pass import Batch, SlotPass, Slots

LogSumExp = Callable[[Tensor], Tensor]
"""Last hidden states [N, D] to the log-sum-exp of their full-vocabulary logits, float32 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised."""

    weights: losses.LossWeights = losses.LossWeights()  # noqa: RUF009  # frozen
    positions: PositionWeights = PositionWeights()  # noqa: RUF009  # frozen
    stop_gradient: bool = False
    """The confidence term trains its own head only, not the backbone (UC-109)."""
    base_weight: float = 0.0
    """Share of the loss that is taken without the sequential head when training starts; it falls
    linearly to 0. 1.0 is the base-anchored curriculum of Domino (arXiv 2605.29707)."""
    base_until: float = 1.0
    """Share of the steps after which `base_weight` has fallen to 0."""
    chunk_rows: int = 512
    """Slots whose probabilities exist at once."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.base_weight <= 1.0:
            raise InputError(f"base_weight is {self.base_weight!r}, but it must lie in [0, 1].")
        if not 0.0 < self.base_until <= 1.0:
            raise InputError(f"base_until is {self.base_until!r}, but it must lie in (0, 1].")

    def base_share(self, progress: float) -> float:
        """The share at this point of the training, 0 at its start and 1 at its end."""
        return self.base_weight * max(0.0, 1.0 - progress / self.base_until)


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


class Objective:
    """Eq. 12 for one drafter; holds the vocabulary map and the (maybe compiled) chunk kernel."""

    def __init__(
        self,
        slot_pass: SlotPass,
        *,
        config: ObjectiveConfig,
        target_head: TargetHead,
        kernel: losses.ChunkKernel | None = None,
    ) -> None:
        self.slot_pass = slot_pass
        self.config = config
        self._target_head = target_head
        self._kernel = kernel
        self._vocabulary: DraftVocabulary | None = None
        if slot_pass.d2t_S is not None:
            vocab_size = slot_pass.sizes.vocab_size
            self._vocabulary = DraftVocabulary.of(slot_pass.d2t_S, vocab_size=vocab_size)

    def normaliser(self, batch: Batch) -> float:
        """What this batch adds to the divisor of the step's loss, which all batches share.

        The sum of position weights; the number of blocks where weights follow the drafter.
        """
        if not self.config.positions.is_fixed:
            return float(batch.valid_AK[:, 0].sum())
        return float(self._fixed_weights(batch).sum())

    def __call__(
        self,
        batch: Batch,
        *,
        normaliser: float,
        input_scale_M: Tensor | None,
        progress: float = 1.0,
        has_agreement: bool = False,
    ) -> Outcome:
        """Loss of `batch` divided by `normaliser`, the sum of that of all micro-batches and ranks.

        `progress` is the share of the training that is done.
        """
        config, slots = self.config, self._slots(batch, input_scale_M)
        draft, base_share = self._draft_logits(slots), config.base_share(progress)
        head = self._head_loss(batch, draft, (1.0 - base_share) / normaliser, has_agreement)
        loss, confidence_N = head.total, None
        if base_share > 0.0:
            base = replace(draft, state_Nr=None, w2_Sr=None)
            loss = loss + self._head_loss(batch, base, base_share / normaliser, False).total
        if self.slot_pass.has_confidence and config.weights.confidence > 0:
            assert head.acceptance_N is not None
            confidence_N = self.slot_pass.confidence(slots, stop_gradient=config.stop_gradient)
            weights_N = head.weights_N / max(1.0 - base_share, 1e-9)
            term = losses.confidence_loss(confidence_N, head.acceptance_N, weights_N=weights_N)
            loss = loss + config.weights.confidence * term
        return Outcome(loss=loss, rows_N=batch.rows_N, head=head, confidence_N=confidence_N)

    @torch.no_grad()
    def first_bad(self, batches: Sequence[Batch], *, input_scale_M: Tensor | None) -> str:
        """Which tensor is the first that is not finite, from the inputs to the logits (UC-115)."""
        for name, parameter in self.slot_pass.module.named_parameters():
            if not bool(local_of(parameter).isfinite().all()):
                return f"parameter {name} is not finite"
        for batch in batches:
            for name, tensor in (("taps", batch.taps_TM), ("last hidden states", batch.last_ND)):
                if not bool(tensor.isfinite().all()):
                    return f"the target's {name} are not finite"
        for batch in batches:
            slots = self._slots(batch, input_scale_M)
            if not bool(slots.hidden_ND.isfinite().all()):
                return "the drafter's hidden states are not finite"
            if slots.state_Nr is not None and not bool(slots.state_Nr.isfinite().all()):
                return "the sequential head's features are not finite"
        return "all tensors before the logits are finite, here or on this rank"

    def _head_loss(
        self, batch: Batch, draft: losses.DraftLogits, factor: float, has_agreement: bool
    ) -> losses.HeadLoss:
        config = self.config
        reweigh = chunk_ends = None
        if not config.positions.is_fixed:
            reweigh, chunk_ends = self._reweigh(batch), _block_ends(batch.valid_AK)
        return losses.head_loss(
            draft,
            target=self._target(batch),
            labels=self._labels(batch),
            weights_N=self._fixed_weights(batch).flatten()[batch.rows_N] * factor,
            weights=config.weights,
            chunk_rows=config.chunk_rows,
            kernel=self._kernel,
            has_agreement=has_agreement,
            reweigh=reweigh,
            chunk_ends=chunk_ends,
        )

    def _fixed_weights(self, batch: Batch) -> Tensor:
        positions = self.config.positions
        if not positions.is_fixed:
            return batch.valid_AK.float()
        return position_weights.decayed(batch.valid_AK, decay=positions.decay)

    def _reweigh(self, batch: Batch) -> losses.Reweigh:
        """D-PACE weights of the rows of a chunk, which holds whole blocks."""
        positions, block_size = self.config.positions, batch.valid_AK.shape[1]

        def weights(rows: slice, ce_n: Tensor, acceptance_n: Tensor) -> Tensor:
            at_n = batch.rows_N[rows]
            at_n = at_n - at_n[0] // block_size * block_size
            confidence_n = torch.exp(-ce_n) if positions.kind == "dpace" else acceptance_n
            num_slots = int(at_n[-1]) // block_size * block_size + block_size
            confidence_RK = confidence_n.new_zeros(num_slots).index_copy(0, at_n, confidence_n)
            valid_RK = torch.zeros(num_slots, dtype=torch.bool, device=at_n.device)
            valid_RK[at_n] = True
            weights_RK = position_weights.dpace(
                confidence_RK.view(-1, block_size),
                valid_RK.view(-1, block_size),
                alpha=positions.alpha,
            )
            return weights_RK.view(-1)[at_n]

        return weights

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


def _block_ends(valid_AK: Tensor) -> list[int]:
    """Rows, among the supervised ones, behind which a block ends."""
    ends: list[int] = valid_AK.sum(dim=1).cumsum(dim=0).tolist()
    return ends
