"""The training objective (Eq. 9-12) over supervised slots, with its gradient written by hand.

It does not know blocks, sequences or optimisers: N rows in, one number out.

Letters: N supervised slots, S draft vocabulary, D hidden size, r rank of the sequential head.
The probabilities of a chunk of rows exist once and only while that chunk is handled; no
[N, S] tensor is kept for the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.errors import InputError

ChunkKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Weights of the three terms; a term of weight 0 needs none of its inputs."""

    ce: float = 0.1
    """Cross-entropy against the answer's own token (Eq. 9)."""
    l1: float = 0.9
    """Full L1 distance between draft and target distribution, twice their TV (Eq. 10)."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence against 1 - L1/2 (Eq. 11)."""

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise InputError(f"Loss weight {name} is {value!r}, but it must be at least 0.")

    @property
    def needs_target(self) -> bool:
        """Whether the target's distribution enters the loss."""
        return self.l1 > 0 or self.confidence > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLogits:
    """What the draft logits of N slots are made of: z = hidden head^T + state w2^T.

    `state_Nr` is what the sequential head feeds to its output matrix `w2_Sr`; both `None`
    without a sequential head. `head_SD` is the target's frozen LM head over the draft
    vocabulary; it gets no gradient.
    """

    hidden_ND: Tensor
    head_SD: Tensor
    state_Nr: Tensor | None = None
    w2_Sr: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """The target's distribution at the same slots, by its last hidden state.

    Its logits are softcap * tanh(scale * last head^T / softcap) with the `head_SD` of
    `DraftLogits`. `lse_N` is their log-sum-exp over the FULL vocabulary, float32; `None` only if
    the draft vocabulary is the full one.
    """

    last_ND: Tensor
    lse_N: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, rows: slice, head_SD: Tensor) -> Tensor:
        """Logits [n, S] of some rows on the draft vocabulary."""
        logits_nS = self.last_ND[rows] @ head_SD.T
        if self.scale != 1.0:
            logits_nS = logits_nS * self.scale
        if self.softcap is not None:
            logits_nS = torch.tanh(logits_nS / self.softcap) * self.softcap
        return logits_nS


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The true next tokens as indices into the draft vocabulary.

    A token outside the draft vocabulary has `inside_N` false: it cannot be drafted, so its
    cross-entropy (infinite) is left out, while its L1 and confidence terms count.
    """

    index_N: Tensor
    inside_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """Result of `head_loss`: `total` carries the gradient, the rest is detached.

    `ce_N`, `l1_N` are unweighted; `acceptance_N` = 1 - L1/2 over the full vocabulary (Eq. 8),
    `None` without a target; `agrees_N` whether draft and target share their most likely token
    inside the draft vocabulary.
    """

    total: Tensor
    ce_N: Tensor
    l1_N: Tensor | None
    acceptance_N: Tensor | None
    agrees_N: Tensor | None


def chunk_terms(
    z_nS: Tensor, t_nS: Tensor, lse_n: Tensor, ce_n: Tensor, l1_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Elementwise work of n rows, made to be compiled: (dz_nS, log_sum_n, l1_n).

    `t_nS` target logits on the draft vocabulary, `lse_n` over the full one; `ce_n`, `l1_n` the
    factors of the two terms in the total. With q = softmax(z) and p = exp(t - lse), both of
    total mass 1 and q zero outside the draft vocabulary:

        L1 = 2 - 2 sum_S min(q, p)                        exact, mass outside included
        dL1/dz = q * (s - sum_S q s),  s = +1 where q > p, else -1
        dCE/dz = q - onehot                               the caller subtracts the one-hot
    """
    z_32, t_32 = z_nS.float(), t_nS.float()
    top = z_nS.amax(dim=1, keepdim=True).float()
    log_sum = top + (z_32 - top).exp().sum(dim=1, keepdim=True).log()
    log_q, log_p = z_32 - log_sum, t_32 - lse_n[:, None]
    q, p = log_q.exp(), log_p.exp()
    is_above = log_q > log_p
    l1 = 2.0 - 2.0 * torch.minimum(q, p).sum(dim=1)
    mean_sign = 2.0 * torch.where(is_above, q, 0.0).sum(dim=1, keepdim=True) - 1.0
    above = ce_n[:, None] + l1_n[:, None] * (1.0 - mean_sign)
    below = ce_n[:, None] - l1_n[:, None] * (1.0 + mean_sign)
    dz = q * torch.where(is_above, above, below)
    return dz.to(z_nS.dtype), log_sum[:, 0], l1


def head_loss(
    draft: DraftLogits,
    *,
    target: TargetRows | None,
    labels: Labels | None,
    weights_N: Tensor,
    weights: LossWeights,
    chunk_rows: int = 512,
    kernel: ChunkKernel = chunk_terms,
    has_agreement: bool = False,
) -> HeadLoss:
    """sum_N w (ce CE + l1 L1), the first two terms of Eq. 12, and their per-row values.

    `weights_N` float32, already divided by the GLOBAL sum of weights (all micro-batches and
    ranks). `kernel` is `chunk_terms` or a compiled form of it. Rows are handled `chunk_rows` at
    a time, so the extra memory is that of one chunk whatever N and S are. `has_agreement` asks
    for `agrees_N`, which training does not need.
    """
    if weights.ce > 0 and labels is None:
        raise InputError("Loss weight ce is above 0 but no labels were given; set it to 0.")
    if weights.needs_target and target is None:
        raise InputError(
            "Loss weights l1 or confidence are above 0 but no target states were given; "
            "set both to 0 or supply the target's last hidden states."
        )
    if not weights.needs_target:
        target = None
    num_rows = draft.hidden_ND.shape[0]
    if labels is None:
        device = draft.hidden_ND.device
        labels = Labels(
            index_N=torch.zeros(num_rows, dtype=torch.long, device=device),
            inside_N=torch.zeros(num_rows, dtype=torch.bool, device=device),
        )
    context = _Fixed(
        head_SD=draft.head_SD,
        target=target,
        index_N=labels.index_N,
        ce_N=weights_N * labels.inside_N * weights.ce,
        l1_N=weights_N * weights.l1,
        chunk_rows=chunk_rows,
        kernel=kernel,
        has_agreement=has_agreement,
    )
    total, ce_N, l1_N, agrees_N = _FusedHead.apply(  # type: ignore[no-untyped-call]
        draft.hidden_ND, draft.state_Nr, draft.w2_Sr, context
    )
    ce_N = torch.where(labels.inside_N, ce_N, 0.0)
    if target is None:
        return HeadLoss(total=total, ce_N=ce_N, l1_N=None, acceptance_N=None, agrees_N=None)
    return HeadLoss(
        total=total,
        ce_N=ce_N,
        l1_N=l1_N,
        acceptance_N=(1.0 - 0.5 * l1_N).clamp(0.0, 1.0),
        agrees_N=agrees_N if has_agreement else None,
    )


def confidence_loss(logits_N: Tensor, acceptance_N: Tensor, *, weights_N: Tensor) -> Tensor:
    """sum_N w BCE(sigmoid(logit), 1 - L1/2), Eq. 11; finite for any finite logit (UC-109)."""
    bce_N = F.binary_cross_entropy_with_logits(
        logits_N.float(), acceptance_N.detach(), reduction="none"
    )
    return (weights_N * bce_N).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """What `_FusedHead` needs and gives no gradient to."""

    head_SD: Tensor
    target: TargetRows | None
    index_N: Tensor
    ce_N: Tensor
    l1_N: Tensor
    chunk_rows: int
    kernel: ChunkKernel
    has_agreement: bool


class _FusedHead(torch.autograd.Function):
    """Head and loss in one: gradients of hidden, state and w2 are formed chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, state_Nr: Tensor | None, w2_Sr: Tensor | None, fixed: _Fixed
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_rows = hidden_ND.shape[0]
        ce_N = hidden_ND.new_zeros(num_rows, dtype=torch.float32)
        l1_N = torch.zeros_like(ce_N)
        agrees_N = torch.zeros_like(ce_N, dtype=torch.bool)
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_state_Nr = None if state_Nr is None else torch.empty_like(state_Nr)
        d_w2_Sr = None if w2_Sr is None else torch.zeros_like(w2_Sr, dtype=torch.float32)
        for start in range(0, num_rows, fixed.chunk_rows):
            rows = slice(start, min(start + fixed.chunk_rows, num_rows))
            z_nS = hidden_ND[rows] @ fixed.head_SD.T
            if state_Nr is not None and w2_Sr is not None:
                torch.addmm(z_nS, state_Nr[rows], w2_Sr.T, out=z_nS)
            dz_nS, ce_N[rows], l1_N[rows], agrees_N[rows] = _chunk(z_nS, fixed, rows)
            if d_state_Nr is not None and d_w2_Sr is not None:
                assert state_Nr is not None
                assert w2_Sr is not None
                torch.mm(dz_nS, w2_Sr, out=d_state_Nr[rows])
                d_w2_Sr += dz_nS.T @ state_Nr[rows]
            torch.mm(dz_nS, fixed.head_SD, out=d_hidden_ND[rows])
        ctx.gradients = (d_hidden_ND, d_state_Nr, d_w2_Sr)
        ctx.w2_dtype = None if w2_Sr is None else w2_Sr.dtype
        ctx.mark_non_differentiable(ce_N, l1_N, agrees_N)
        total = (fixed.ce_N * ce_N + fixed.l1_N * l1_N).sum()
        return total, ce_N, l1_N, agrees_N

    @staticmethod
    def backward(
        ctx: Any, d_total: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        d_hidden_ND, d_state_Nr, d_w2_Sr = ctx.gradients
        return (
            d_hidden_ND * d_total.to(d_hidden_ND.dtype),
            None if d_state_Nr is None else d_state_Nr * d_total.to(d_state_Nr.dtype),
            None if d_w2_Sr is None else (d_w2_Sr * d_total).to(ctx.w2_dtype),
            None,
        )


def _chunk(z_nS: Tensor, fixed: _Fixed, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dz_nS, ce, l1, agrees) of one chunk; without a target l1 is 0."""
    index_n, ce_n = fixed.index_N[rows], fixed.ce_N[rows]
    is_row_n = torch.arange(z_nS.shape[0], device=z_nS.device)
    label_n = z_nS[is_row_n, index_n].float()
    target = fixed.target
    if target is None:
        log_sum_n = z_nS.float().logsumexp(dim=1)
        dz_nS = ((z_nS.float() - log_sum_n[:, None]).exp() * ce_n[:, None]).to(z_nS.dtype)
        l1 = torch.zeros_like(log_sum_n)
        agrees = l1.bool()
    else:
        t_nS = target.logits(rows, fixed.head_SD)
        lse_n = t_nS.float().logsumexp(dim=1) if target.lse_N is None else target.lse_N[rows]
        dz_nS, log_sum_n, l1 = fixed.kernel(z_nS, t_nS, lse_n, ce_n, fixed.l1_N[rows])
        agrees = l1.bool()
        if fixed.has_agreement:
            agrees = z_nS.argmax(dim=1) == t_nS.argmax(dim=1)
    dz_nS[is_row_n, index_n] -= ce_n.to(dz_nS.dtype)
    return dz_nS, log_sum_n - label_n, l1, agrees
