"""The training objective (Eq. 9-12) over supervised slots, with its gradient written by hand.

It does not know blocks, sequences or optimisers: N rows in, one number out.

Letters: N supervised slots, S draft vocabulary, D hidden size, r rank of the sequential head.
The probabilities of a chunk of rows exist once and only while that chunk is handled; no
[N, S] tensor is kept for the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.errors import InputError

ChunkKernel = Callable[[Tensor, Tensor, Tensor, "Factors"], "Terms"]
_LEAST_OVERLAP = 1e-20
"""Logarithms and inverses of smaller overlaps are those of this one."""

Reweigh = Callable[[slice, Tensor, Tensor], Tensor]
"""(rows, ce_n, acceptance_n) to weights_n: a position weight that depends on the drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Weights of the terms; a term of weight 0 needs none of its inputs."""

    ce: float = 0.1
    """Cross-entropy against the answer's own token (Eq. 9)."""
    l1: float = 0.9
    """Full L1 distance between draft and target distribution, twice their TV (Eq. 10)."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence against 1 - L1/2 (Eq. 11)."""
    kl: float = 0.0
    """Divergence KL(target, draft) on the draft vocabulary, the loss of EAGLE-3."""
    nla: float = 0.0
    """Negative log of the acceptance, LK-alpha (arXiv 2602.23881)."""
    hybrid: float = 0.0
    """b KL + (1 - b) TV with b = exp(-hybrid_eta * acceptance), LK-lambda (arXiv 2602.23881)."""
    hybrid_eta: float = 3.0
    """How fast `hybrid` turns from KL to TV as the acceptance grows."""

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence", "kl", "nla", "hybrid", "hybrid_eta"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise InputError(f"Loss weight {name} is {value!r}, but it must be at least 0.")
        if not any((self.ce, self.l1, self.kl, self.nla, self.hybrid, self.confidence)):
            raise InputError("All loss weights are 0; nothing would be learnt.")

    @property
    def needs_target(self) -> bool:
        """Whether the target's distribution enters the loss."""
        return self.l1 > 0 or self.confidence > 0 or self.is_mixed

    @property
    def is_mixed(self) -> bool:
        """Whether a term beyond the paper's three is on."""
        return self.kl > 0 or self.nla > 0 or self.hybrid > 0


class Factors(NamedTuple):
    """What each row's terms count in the total; `ce_n` is 0 where a label cannot be drafted."""

    ce_n: Tensor
    l1_n: Tensor
    kl_n: Tensor
    nla_n: Tensor
    hybrid_n: Tensor
    eta: float

    def at(self, rows: slice) -> "Factors":
        """Those of some rows."""
        return self._each(lambda part: part[rows])

    def scaled(self, weight_n: Tensor) -> "Factors":
        """All terms of a row times its weight."""
        return self._each(lambda part: part * weight_n)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Factors":
        return Factors(
            ce_n=change(self.ce_n),
            l1_n=change(self.l1_n),
            kl_n=change(self.kl_n),
            nla_n=change(self.nla_n),
            hybrid_n=change(self.hybrid_n),
            eta=self.eta,
        )

    def total(self, ce_n: Tensor, overlap_n: Tensor, kl_n: Tensor) -> Tensor:
        """Sum over the rows of all their terms."""
        l1_n = 2.0 - 2.0 * overlap_n
        blend_n = torch.exp(-self.eta * overlap_n)
        row_n = (
            self.ce_n * ce_n
            + self.l1_n * l1_n
            + self.kl_n * kl_n
            - self.nla_n * overlap_n.clamp(min=_LEAST_OVERLAP).log()
            + self.hybrid_n * (blend_n * kl_n + 0.5 * (1.0 - blend_n) * l1_n)
        )
        return row_n.sum()


class Terms(NamedTuple):
    """Of n rows: the gradient [n, S] of their sum, log-sum-exp of the draft logits, the overlap
    sum_S min(q, p) = 1 - L1/2 (Eq. 8), and KL."""

    dz_nS: Tensor
    log_sum_n: Tensor
    overlap_n: Tensor
    kl_n: Tensor


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
    inside the draft vocabulary; `weights_N` the position weights that were used.
    """

    total: Tensor
    ce_N: Tensor
    l1_N: Tensor | None
    acceptance_N: Tensor | None
    agrees_N: Tensor | None
    weights_N: Tensor


def paper_terms(z_nS: Tensor, t_nS: Tensor, lse_n: Tensor, factors: Factors) -> Terms:
    """Elementwise work of n rows for CE and L1, made to be compiled.

    `t_nS` target logits on the draft vocabulary, `lse_n` over the full one. With q = softmax(z)
    and p = exp(t - lse), both of total mass 1 and q zero outside the draft vocabulary, and b = 1
    where q <= p, else 0:

        L1 = 2 - 2 sum_S min(q, p)                        exact, mass outside included
        dL1/dz = 2 q * (sum_S q b - b)
        dCE/dz = q - onehot                               the caller subtracts the one-hot
    """
    z_32, t_32 = z_nS.float(), t_nS.float()
    top = z_nS.amax(dim=1, keepdim=True).float()
    log_sum = top + (z_32 - top).exp().sum(dim=1, keepdim=True).log()
    log_q, log_p = z_32 - log_sum, t_32 - lse_n[:, None]
    q, p = log_q.exp(), log_p.exp()
    is_above = log_q > log_p
    overlap = torch.minimum(q, p).sum(dim=1)
    below = torch.where(is_above, 0.0, q).sum(dim=1, keepdim=True)
    ce, of_l1 = factors.ce_n[:, None], 2.0 * factors.l1_n[:, None]
    dz = q * (ce + of_l1 * torch.where(is_above, below, below - 1.0))
    return Terms(dz.to(z_nS.dtype), log_sum[:, 0], overlap, torch.zeros_like(overlap))


def mixed_terms(z_nS: Tensor, t_nS: Tensor, lse_n: Tensor, factors: Factors) -> Terms:
    """As `paper_terms`, with KL and the LK losses; a the overlap, P = sum_S p, m as in `hybrid`:

    KL = sum_S p (log(p / P) - log q)                 = KL(p, q) where S is the vocabulary
    dKL/dz = P q - p
    d(-log a)/dz = dL1/dz / (2 a)
    d hybrid/dz = m dKL/dz + (1 - m)/2 dL1/dz         m detached
    """
    z_32, t_32 = z_nS.float(), t_nS.float()
    top = z_nS.amax(dim=1, keepdim=True).float()
    log_sum = top + (z_32 - top).exp().sum(dim=1, keepdim=True).log()
    log_q, log_p = z_32 - log_sum, t_32 - lse_n[:, None]
    q, p = log_q.exp(), log_p.exp()
    mass = p.sum(dim=1, keepdim=True)
    gap = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)
    kl = gap - (mass * mass.clamp(min=_LEAST_OVERLAP).log())[:, 0]
    is_above = log_q > log_p
    overlap = torch.minimum(q, p).sum(dim=1)
    below = torch.where(is_above, 0.0, q).sum(dim=1, keepdim=True)
    blend = torch.exp(-factors.eta * overlap)
    of_l1 = 2.0 * factors.l1_n + factors.hybrid_n * (1.0 - blend)
    of_l1 = of_l1 + factors.nla_n / overlap.clamp(min=_LEAST_OVERLAP)
    of_kl = factors.kl_n + factors.hybrid_n * blend
    sign = torch.where(is_above, below, below - 1.0)
    dz = q * (factors.ce_n[:, None] + of_l1[:, None] * sign) + of_kl[:, None] * (mass * q - p)
    return Terms(dz.to(z_nS.dtype), log_sum[:, 0], overlap, kl)


def kernel_for(weights: LossWeights) -> ChunkKernel:
    """The cheapest kernel that has all wanted terms."""
    return mixed_terms if weights.is_mixed else paper_terms


def head_loss(
    draft: DraftLogits,
    *,
    target: TargetRows | None,
    labels: Labels | None,
    weights_N: Tensor,
    weights: LossWeights,
    chunk_rows: int = 512,
    kernel: ChunkKernel | None = None,
    has_agreement: bool = False,
    reweigh: Reweigh | None = None,
    chunk_ends: Sequence[int] | None = None,
) -> HeadLoss:
    """sum_N w (ce CE + l1 L1 + ..), the terms of Eq. 12 without the confidence, and their values.

    `weights_N` float32, already divided by the GLOBAL normaliser (all micro-batches and ranks).
    `kernel` is that of `kernel_for(weights)` or a compiled form of it. Rows are handled
    `chunk_rows` at a time, so the extra memory is that of one chunk whatever N and S are.
    `has_agreement` asks for `agrees_N`, which training does not need. `reweigh` gives weights
    that depend on the rows' own values, multiplied into `weights_N`; where it needs whole blocks,
    `chunk_ends` are the only rows at which a chunk may end.
    """
    if weights.ce > 0 and labels is None:
        raise InputError("Loss weight ce is above 0 but no labels were given; set it to 0.")
    if weights.needs_target and target is None:
        raise InputError(
            "Loss weights l1, confidence, kl, nla or hybrid are above 0 but no target states were "
            "given; set them to 0 or supply the target's last hidden states."
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
        labels=labels,
        weights_N=weights_N,
        factors=_factors(weights, labels, weights_N),
        chunks=tuple(_chunks(num_rows, chunk_rows, chunk_ends)),
        kernel=kernel_for(weights) if kernel is None else kernel,
        has_agreement=has_agreement,
        reweigh=reweigh,
    )
    total, ce_N, overlap_N, agrees_N, used_N = _FusedHead.apply(  # type: ignore[no-untyped-call]
        draft.hidden_ND, draft.state_Nr, draft.w2_Sr, context
    )
    ce_N = torch.where(labels.inside_N, ce_N, 0.0)
    if target is None:
        return HeadLoss(
            total=total, ce_N=ce_N, l1_N=None, acceptance_N=None, agrees_N=None, weights_N=used_N
        )
    return HeadLoss(
        total=total,
        ce_N=ce_N,
        l1_N=2.0 - 2.0 * overlap_N,
        acceptance_N=overlap_N.clamp(0.0, 1.0),
        agrees_N=agrees_N if has_agreement else None,
        weights_N=used_N,
    )


def _factors(weights: LossWeights, labels: Labels, weights_N: Tensor) -> Factors:
    """Factors of each row before its position weight."""
    ones_N = torch.ones_like(weights_N)
    return Factors(
        ce_n=labels.inside_N * (weights.ce * ones_N),
        l1_n=weights.l1 * ones_N,
        kl_n=weights.kl * ones_N,
        nla_n=weights.nla * ones_N,
        hybrid_n=weights.hybrid * ones_N,
        eta=weights.hybrid_eta,
    )


def _chunks(num_rows: int, chunk_rows: int, ends: Sequence[int] | None) -> Iterator[slice]:
    """Slices of at most `chunk_rows` rows, or of one block where a block is longer."""
    if ends is None:
        for start in range(0, num_rows, chunk_rows):
            yield slice(start, min(start + chunk_rows, num_rows))
        return
    start = previous = 0
    for end in ends:
        if end - start > chunk_rows and previous > start:
            yield slice(start, previous)
            start = previous
        previous = end
    if previous > start:
        yield slice(start, previous)


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
    labels: Labels
    weights_N: Tensor
    factors: Factors
    chunks: tuple[slice, ...]
    kernel: ChunkKernel
    has_agreement: bool
    reweigh: Reweigh | None


class _FusedHead(torch.autograd.Function):
    """Head and loss in one: gradients of hidden, state and w2 are formed chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, state_Nr: Tensor | None, w2_Sr: Tensor | None, fixed: _Fixed
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        num_rows = hidden_ND.shape[0]
        ce_N = hidden_ND.new_zeros(num_rows, dtype=torch.float32)
        overlap_N, used_N = torch.zeros_like(ce_N), fixed.weights_N.clone()
        agrees_N = torch.zeros_like(ce_N, dtype=torch.bool)
        total = torch.zeros((), dtype=fixed.weights_N.dtype, device=hidden_ND.device)
        d_hidden_ND = torch.empty_like(hidden_ND)
        d_state_Nr = None if state_Nr is None else torch.empty_like(state_Nr)
        d_w2_Sr = None if w2_Sr is None else torch.zeros_like(w2_Sr, dtype=torch.float32)
        for rows in fixed.chunks:
            z_nS = hidden_ND[rows] @ fixed.head_SD.T
            if state_Nr is not None and w2_Sr is not None:
                torch.addmm(z_nS, state_Nr[rows], w2_Sr.T, out=z_nS)
            chunk = _chunk(z_nS, fixed, rows)
            dz_nS, total = chunk.dz_nS, total + chunk.total
            ce_N[rows], overlap_N[rows], agrees_N[rows] = (
                chunk.ce_n,
                chunk.overlap_n,
                chunk.agrees_n,
            )
            used_N[rows] = chunk.weight_n
            if d_state_Nr is not None and d_w2_Sr is not None:
                assert state_Nr is not None
                assert w2_Sr is not None
                torch.mm(dz_nS, w2_Sr, out=d_state_Nr[rows])
                d_w2_Sr += dz_nS.T @ state_Nr[rows]
            torch.mm(dz_nS, fixed.head_SD, out=d_hidden_ND[rows])
        ctx.gradients = (d_hidden_ND, d_state_Nr, d_w2_Sr)
        ctx.w2_dtype = None if w2_Sr is None else w2_Sr.dtype
        ctx.mark_non_differentiable(ce_N, overlap_N, agrees_N, used_N)
        return total, ce_N, overlap_N, agrees_N, used_N

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


class _Chunk(NamedTuple):
    """Gradient and values of one chunk, the position weights in the gradient and the total."""

    dz_nS: Tensor
    total: Tensor
    ce_n: Tensor
    overlap_n: Tensor
    agrees_n: Tensor
    weight_n: Tensor


def _chunk(z_nS: Tensor, fixed: _Fixed, rows: slice) -> _Chunk:
    """One chunk; without a target its overlap is 1.

    A weight known before goes into the kernel's factors. One that depends on the rows' values
    scales the gradient afterwards, which is linear in it.
    """
    index_n, weight_n, plain = fixed.labels.index_N[rows], fixed.weights_N[rows], fixed.factors
    factors = plain.at(rows)
    if fixed.reweigh is None:
        factors = factors.scaled(weight_n)
    is_row_n = torch.arange(z_nS.shape[0], device=z_nS.device)
    label_n = z_nS[is_row_n, index_n].float()
    target, agrees_n = fixed.target, torch.zeros_like(label_n, dtype=torch.bool)
    if target is None:
        terms = _labels_only(z_nS, factors)
    else:
        t_nS = target.logits(rows, fixed.head_SD)
        lse_n = t_nS.float().logsumexp(dim=1) if target.lse_N is None else target.lse_N[rows]
        terms = fixed.kernel(z_nS, t_nS, lse_n, factors)
        if fixed.has_agreement:
            agrees_n = z_nS.argmax(dim=1) == t_nS.argmax(dim=1)
    dz_nS, ce_n = terms.dz_nS, terms.log_sum_n - label_n
    dz_nS[is_row_n, index_n] -= factors.ce_n.to(dz_nS.dtype)
    if fixed.reweigh is not None:
        label_ce_n = torch.where(fixed.labels.inside_N[rows], ce_n, float("inf"))
        weight_n = weight_n * fixed.reweigh(rows, label_ce_n, terms.overlap_n)
        factors = factors.scaled(weight_n)
        dz_nS *= weight_n[:, None].to(dz_nS.dtype)
    total = factors.total(ce_n, terms.overlap_n, terms.kl_n)
    return _Chunk(dz_nS, total, ce_n, terms.overlap_n, agrees_n, weight_n)


def _labels_only(z_nS: Tensor, factors: Factors) -> Terms:
    """Cross-entropy alone."""
    log_sum_n = z_nS.float().logsumexp(dim=1)
    dz_nS = ((z_nS.float() - log_sum_n[:, None]).exp() * factors.ce_n[:, None]).to(z_nS.dtype)
    return Terms(dz_nS, log_sum_n, torch.ones_like(log_sum_n), torch.zeros_like(log_sum_n))
