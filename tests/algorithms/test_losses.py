from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dspark.algorithms import losses
from dspark.errors import InputError


@dataclass
class Case:
    """N rows over a vocabulary of V of which S can be drafted, float64."""

    hidden_ND: Tensor
    state_Nr: Tensor
    w2_Sr: Tensor
    head_VD: Tensor
    last_ND: Tensor
    label_N: Tensor
    weights_N: Tensor

    def draft(self, size: int) -> losses.DraftLogits:
        return losses.DraftLogits(
            hidden_ND=self.hidden_ND,
            head_SD=self.head_VD[:size],
            state_Nr=self.state_Nr,
            w2_Sr=self.w2_Sr[:size],
        )

    def target(self) -> losses.TargetRows:
        lse_N = (self.last_ND @ self.head_VD.T).logsumexp(dim=1)
        return losses.TargetRows(last_ND=self.last_ND, lse_N=lse_N)

    def labels(self, size: int) -> losses.Labels:
        is_inside = self.label_N < size
        return losses.Labels(index_N=torch.where(is_inside, self.label_N, 0), inside_N=is_inside)

    def parameters(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden_ND, self.state_Nr, self.w2_Sr


def case(*, num_rows: int = 37, vocab: int = 80, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        hidden_ND=(normal(num_rows, 16) * scale).requires_grad_(),
        state_Nr=normal(num_rows, 4).requires_grad_(),
        w2_Sr=normal(vocab, 4).requires_grad_(),
        head_VD=normal(vocab, 16),
        last_ND=normal(num_rows, 16) * scale,
        label_N=torch.randint(vocab, (num_rows,), generator=generator),
        weights_N=torch.rand(num_rows, generator=generator, dtype=torch.float64),
    )


def dense(c: Case, size: int, weights: losses.LossWeights) -> tuple[Tensor, Tensor]:
    """The two terms written down over the whole vocabulary, with autograd: (total, L1)."""
    z_NS = c.hidden_ND @ c.head_VD[:size].T + c.state_Nr @ c.w2_Sr[:size].T
    nothing = torch.zeros(len(z_NS), len(c.head_VD) - size, dtype=z_NS.dtype)
    q_NV = torch.cat([z_NS.softmax(dim=1), nothing], dim=1)
    p_NV = (c.last_ND @ c.head_VD.T).softmax(dim=1)
    l1_N = (q_NV - p_NV).abs().sum(dim=1)
    labels = c.labels(size)
    log_q_N = z_NS.log_softmax(dim=1).gather(1, labels.index_N[:, None])[:, 0]
    ce_N = torch.where(labels.inside_N, -log_q_N, 0.0)
    return (c.weights_N * (weights.ce * ce_N + weights.l1 * l1_N)).sum(), l1_N


@pytest.mark.parametrize("size", [50, 80])
@pytest.mark.parametrize("chunk_rows", [5, 1000])
def test_loss_and_gradients_equal_the_dense_reference(size: int, chunk_rows: int):
    c, weights = case(), losses.LossWeights()
    expected, l1_N = dense(c, size, weights)
    wanted = torch.autograd.grad(expected, c.parameters())
    result = losses.head_loss(
        c.draft(size),
        target=c.target(),
        labels=c.labels(size),
        weights_N=c.weights_N,
        weights=weights,
        chunk_rows=chunk_rows,
    )
    found = torch.autograd.grad(result.total, c.parameters())
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert result.l1_N is not None
    torch.testing.assert_close(result.l1_N.double(), l1_N.detach(), atol=1e-6, rtol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_without_a_draft_vocabulary_the_log_sum_exp_is_not_needed():
    c = case()
    target = losses.TargetRows(last_ND=c.last_ND, lse_N=None)
    result = losses.head_loss(
        c.draft(80),
        target=target,
        labels=c.labels(80),
        weights_N=c.weights_N,
        weights=losses.LossWeights(),
    )
    expected, _ = dense(c, 80, losses.LossWeights())
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_acceptance_is_one_minus_half_the_distance_and_one_for_equal_distributions():
    c = case()
    draft = losses.DraftLogits(hidden_ND=c.last_ND, head_SD=c.head_VD)
    result = losses.head_loss(
        draft,
        target=c.target(),
        labels=None,
        weights_N=c.weights_N,
        weights=losses.LossWeights(ce=0.0),
        has_agreement=True,
    )
    assert result.acceptance_N is not None
    assert result.agrees_N is not None
    torch.testing.assert_close(result.acceptance_N, torch.ones(37), atol=1e-5, rtol=0)
    assert bool(result.agrees_N.all())


def test_a_label_outside_the_draft_vocabulary_costs_no_cross_entropy_but_its_distance():
    c = case()
    c.label_N[:] = 79
    result = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=c.labels(50),
        weights_N=c.weights_N,
        weights=losses.LossWeights(),
    )
    _, l1_N = dense(c, 50, losses.LossWeights())
    assert result.ce_N.tolist() == [0.0] * 37
    assert result.total.item() == pytest.approx(0.9 * (c.weights_N * l1_N).sum().item(), rel=1e-5)


@pytest.mark.parametrize("off", ["ce", "l1", "confidence"])
def test_a_term_of_weight_zero_needs_none_of_its_inputs(off: str):
    """UC-110."""
    c = case()
    weights = losses.LossWeights(**{off: 0.0})
    result = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=None if off == "ce" else c.labels(50),
        weights_N=c.weights_N,
        weights=weights,
    )
    expected, _ = dense(c, 50, weights)
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-5)


def test_cross_entropy_alone_needs_no_target():
    """UC-110: the DFlash loss."""
    c, weights = case(), losses.LossWeights(ce=1.0, l1=0.0, confidence=0.0)
    expected, _ = dense(c, 50, weights)
    wanted = torch.autograd.grad(expected, c.parameters())
    result = losses.head_loss(
        c.draft(50), target=None, labels=c.labels(50), weights_N=c.weights_N, weights=weights
    )
    found = torch.autograd.grad(result.total, c.parameters())
    assert result.acceptance_N is None
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_missing_inputs_of_a_wanted_term_are_named():
    c = case()
    with pytest.raises(InputError, match="Loss weight ce is above 0"):
        losses.head_loss(
            c.draft(50),
            target=c.target(),
            labels=None,
            weights_N=c.weights_N,
            weights=losses.LossWeights(),
        )
    with pytest.raises(InputError, match="no target states"):
        losses.head_loss(
            c.draft(50),
            target=None,
            labels=c.labels(50),
            weights_N=c.weights_N,
            weights=losses.LossWeights(),
        )
    with pytest.raises(InputError, match="Loss weight l1 is -1"):
        losses.LossWeights(l1=-1.0)


def test_logits_of_ten_thousands_give_finite_losses_and_gradients():
    c = case(scale=2000.0)
    result = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=c.labels(50),
        weights_N=c.weights_N,
        weights=losses.LossWeights(),
    )
    gradients = torch.autograd.grad(result.total, c.parameters())
    assert bool(result.total.isfinite())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_a_confidence_logit_of_ten_thousand_gives_a_finite_loss():
    """UC-109."""
    logits_N = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    loss = losses.confidence_loss(logits_N, torch.tensor([0.0, 1.0, 0.5]), weights_N=torch.ones(3))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(2e4 + 0.6931472, rel=1e-6)
    assert logits_N.grad is not None
    assert logits_N.grad.tolist() == [1.0, -1.0, 0.0]


def test_the_target_of_the_confidence_is_detached():
    acceptance_N = torch.tensor([0.3], requires_grad=True)
    logits_N = torch.zeros(1, requires_grad=True)
    losses.confidence_loss(logits_N, acceptance_N, weights_N=torch.ones(1)).backward()
    assert acceptance_N.grad is None
    assert logits_N.grad is not None
    assert logits_N.grad.item() == pytest.approx(0.2)


def test_scale_and_soft_cap_shape_the_targets_logits():
    c = case()
    logits_NV = torch.tanh(0.5 * (c.last_ND @ c.head_VD.T) / 3.0) * 3.0
    target = losses.TargetRows(
        last_ND=c.last_ND, lse_N=logits_NV.logsumexp(dim=1), scale=0.5, softcap=3.0
    )
    result = losses.head_loss(
        c.draft(80),
        target=target,
        labels=c.labels(80),
        weights_N=c.weights_N,
        weights=losses.LossWeights(),
    )
    z_NV = c.hidden_ND @ c.head_VD.T + c.state_Nr @ c.w2_Sr.T
    l1_N = (z_NV.softmax(dim=1) - logits_NV.softmax(dim=1)).abs().sum(dim=1)
    assert result.l1_N is not None
    torch.testing.assert_close(result.l1_N.double(), l1_N.detach(), atol=1e-5, rtol=1e-5)


def test_no_tensor_of_all_rows_times_vocabulary_outlives_the_forward_pass():
    c = case(num_rows=64)
    result = losses.head_loss(
        c.draft(80),
        target=c.target(),
        labels=c.labels(80),
        weights_N=c.weights_N,
        weights=losses.LossWeights(),
        chunk_rows=8,
    )
    node = result.total.grad_fn
    assert node is not None
    kept = [tensor for tensor in node.gradients if tensor is not None]  # type: ignore[attr-defined]
    assert [tuple(tensor.shape) for tensor in kept] == [(64, 16), (64, 4), (80, 4)]


@pytest.mark.slow
def test_the_compiled_kernel_equals_the_eager_one():
    generator = torch.Generator().manual_seed(0)
    z_nS = torch.randn(9, 33, generator=generator)
    t_nS = torch.randn(9, 33, generator=generator)
    lse_n = t_nS.logsumexp(dim=1) + 0.1
    parts = torch.rand(5, 9, generator=generator)
    factors = losses.Factors(*parts, eta=3.0)

    def both(*inputs: object) -> list[Tensor]:
        return [*losses.paper_terms(*inputs), *losses.mixed_terms(*inputs)]

    found = torch.compile(both, dynamic=True)(z_nS, t_nS, lse_n, factors)  # compiling takes long
    for one, other in zip(found, both(z_nS, t_nS, lse_n, factors), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


LK = {"ce": 0.0, "l1": 0.0, "confidence": 0.0}


def dense_terms(c: Case, size: int, weights: losses.LossWeights) -> Tensor:
    """KL and the LK losses of each row by autograd over the whole vocabulary, times its weight."""
    z_NS = c.hidden_ND @ c.head_VD[:size].T + c.state_Nr @ c.w2_Sr[:size].T
    log_q_NS = z_NS.log_softmax(dim=1)
    p_NS = (c.last_ND @ c.head_VD.T).softmax(dim=1)[:, :size]
    mass_N1 = p_NS.sum(dim=1, keepdim=True)
    kl_N = (p_NS * ((p_NS / mass_N1).log() - log_q_NS)).sum(dim=1)
    overlap_N = torch.minimum(log_q_NS.exp(), p_NS).sum(dim=1)
    blend_N = (-weights.hybrid_eta * overlap_N.detach()).exp()
    hybrid_N = blend_N * kl_N + (1.0 - blend_N) * (1.0 - overlap_N)
    row_N = weights.kl * kl_N - weights.nla * overlap_N.log() + weights.hybrid * hybrid_N
    return (c.weights_N * row_N).sum()


@pytest.mark.parametrize("size", [50, 80])
@pytest.mark.parametrize(
    "weights",
    [
        losses.LossWeights(**{**LK, "kl": 1.0}),
        losses.LossWeights(**{**LK, "nla": 0.7}),
        losses.LossWeights(**{**LK, "hybrid": 1.3}),
        losses.LossWeights(**{**LK, "hybrid": 1.0, "hybrid_eta": 0.5}),
        losses.LossWeights(ce=0.1, l1=0.9, kl=0.2, nla=0.3, hybrid=0.4),
    ],
)
def test_kl_and_lk_losses_equal_the_dense_reference(size: int, weights: losses.LossWeights):
    """arXiv 2602.23881: values and gradients, with and without a draft vocabulary."""
    c = case()
    expected = dense_terms(c, size, weights)
    if weights.l1 > 0:
        expected = expected + dense(c, size, weights)[0]
    wanted = torch.autograd.grad(expected, c.parameters())
    result = losses.head_loss(
        c.draft(size),
        target=c.target(),
        labels=c.labels(size),
        weights_N=c.weights_N,
        weights=weights,
        chunk_rows=5,
    )
    found = torch.autograd.grad(result.total, c.parameters())
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_the_hybrid_loss_lies_between_kl_and_total_variation():
    c = case()

    def total(**values: float) -> float:
        weights = losses.LossWeights(**{**LK, **values})
        return losses.head_loss(
            c.draft(80), target=c.target(), labels=None, weights_N=c.weights_N, weights=weights
        ).total.item()

    assert total(hybrid=1.0, hybrid_eta=0.0) == pytest.approx(total(kl=1.0), rel=1e-6)
    assert total(hybrid=1.0, hybrid_eta=1e9) == pytest.approx(total(l1=0.5), rel=1e-6)


def test_at_a_point_mass_the_negative_log_acceptance_is_the_cross_entropy():
    c = case()
    label_N = (c.last_ND @ c.head_VD.T).argmax(dim=1)
    c.last_ND *= 1000.0
    kept = losses.LossWeights(**{**LK, "nla": 1.0})
    as_labels = losses.LossWeights(**{**LK, "ce": 1.0})
    labels = losses.Labels(index_N=label_N, inside_N=torch.ones(37, dtype=torch.bool))
    found, wanted = (
        losses.head_loss(
            c.draft(80), target=c.target(), labels=labels, weights_N=c.weights_N, weights=weights
        ).total.item()
        for weights in (kept, as_labels)
    )
    assert found == pytest.approx(wanted, rel=1e-2)  # an acceptance below 1e-6 counts as that


@pytest.mark.parametrize("kind", ["ce", "acceptance"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_weights_that_follow_the_rows_scale_loss_and_gradients(kind: str, chunk_rows: int):
    """The gradient of a row is linear in its weight; a weight never reads half a block."""
    c, weights = case(), losses.LossWeights()
    ends = [4, 8, 9, 16, 21, 30, 37]
    whole = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=c.labels(50),
        weights_N=c.weights_N,
        weights=weights,
    )
    assert whole.acceptance_N is not None
    inside_N = c.labels(50).inside_N
    by_ce_N = torch.where(inside_N, (-whole.ce_N).exp(), 0.0)
    value_N = by_ce_N if kind == "ce" else whole.acceptance_N
    factor_N = torch.cat([part.flip(0).cumsum(0).flip(0) for part in value_N.tensor_split(ends)])
    fixed = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=c.labels(50),
        weights_N=c.weights_N * factor_N,
        weights=weights,
    )

    def reweigh(rows: slice, ce_n: Tensor, acceptance_n: Tensor) -> Tensor:
        inner = [end - rows.start for end in ends if rows.start < end < rows.stop]
        value_n = (-ce_n).exp() if kind == "ce" else acceptance_n
        parts = value_n.tensor_split(inner)
        return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])

    found = losses.head_loss(
        c.draft(50),
        target=c.target(),
        labels=c.labels(50),
        weights_N=c.weights_N,
        weights=weights,
        reweigh=reweigh,
        chunk_ends=ends,
        chunk_rows=chunk_rows,
    )
    assert found.total.item() == pytest.approx(fixed.total.item(), rel=1e-5)
    torch.testing.assert_close(found.weights_N, fixed.weights_N, atol=1e-6, rtol=1e-5)
    wanted = torch.autograd.grad(fixed.total, c.parameters())
    got = torch.autograd.grad(found.total, c.parameters())
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_loss_weights_that_teach_nothing_are_refused():
    with pytest.raises(InputError, match="nothing would be learnt"):
        losses.LossWeights(**LK)
