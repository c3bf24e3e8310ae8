from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.algorithms import losses
from dspark.algorithms.position_weights import PositionWeights, decayed
from dspark.data.batches import Batch
from dspark.models.drafter import Drafter
from dspark.models.packed_attention import PackedBlocks
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig
from tests.data.toy_answers import answer, random_answers
from tests.toys import VOCAB_SIZE, toy_target
from tests.training.toy_training import batch_of, log_sum_exp_of, trainable_drafter

D2T = torch.arange(3, VOCAB_SIZE, 2)


def weight_sum(batch: Batch) -> float:
    return float(decayed(batch.valid_AK, decay=4.0).sum())


def gradients(
    drafter: Drafter, batches: Iterable[Batch], *, normaliser: float, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Summed loss and gradients of some batches."""
    target = toy_target()
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(**options), target_head=log_sum_exp_of(target)
    )
    drafter.zero_grad()
    total = 0.0
    for batch in batches:
        outcome = objective(batch, normaliser=normaliser, input_scale_M=None)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        total += outcome.loss.item()
    return total, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in drafter.named_parameters()
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert any(bool(tensor.abs().max() > 1e-4) for tensor in one.values())
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("d2t_S", [None, D2T])
def test_packed_blocks_equal_one_block_at_a_time(kind: str, d2t_S: Tensor | None):
    """UC-114, method section 7: losses and all gradients, with and without a draft vocabulary."""
    target = toy_target()
    drafter = trainable_drafter(target, d2t_S=d2t_S, markov_head_type=kind)
    answers = [
        answer(0, prompt=[5, 6, 7], ids=[8, 9, 10, 11, 12, 13, 14]),
        answer(1, prompt=[20, 21], ids=[22, 23, 24, 25, 26]),
    ]
    anchors = [[3, 5, 8], [2, 4]]
    whole = batch_of(target, answers, anchors)
    normaliser = weight_sum(whole)
    alone = [
        batch_of(target, [item], [[anchor]])
        for item, chosen in zip(answers, anchors, strict=True)
        for anchor in chosen
    ]
    packed_loss, packed = gradients(drafter, [whole], normaliser=normaliser)
    alone_loss, one_by_one = gradients(drafter, alone, normaliser=normaliser)
    assert packed_loss == pytest.approx(alone_loss, abs=1e-6)
    assert_same(packed, one_by_one)


@pytest.mark.parametrize("only", ["ce", "l1", "confidence"])
def test_two_parts_of_3_and_30_slots_equal_one_step_of_33(only: str):
    """UC-111: for each term by itself."""
    target = toy_target()
    drafter = trainable_drafter(target)
    short = answer(0, prompt=[5, 6], ids=[7, 8, 9])  # anchors 2, 3: 2 + 1 slots
    long = answer(1, prompt=[5, 6], ids=list(range(7, 16)))  # 4*5 + 3 + 2 + 1 = 26, and 4
    parts = [
        batch_of(target, [short], [[2, 3]]),
        batch_of(target, [long, long], [[2, 3, 4, 5, 6, 7, 8, 9], [3]]),
    ]
    assert [len(part.rows_N) for part in parts] == [3, 30]
    whole = batch_of(target, [short, long, long], [[2, 3], [2, 3, 4, 5, 6, 7, 8, 9], [3]])
    zero = {"ce": 0.0, "l1": 0.0, "confidence": 0.0}
    weights = losses.LossWeights(**{**zero, only: 1.0})
    normaliser = weight_sum(whole)
    assert sum(weight_sum(part) for part in parts) == pytest.approx(normaliser)
    one, together = gradients(drafter, [whole], normaliser=normaliser, weights=weights)
    two, summed = gradients(drafter, parts, normaliser=normaliser, weights=weights)
    assert one == pytest.approx(two, abs=1e-6)
    assert_same(together, summed)


def test_a_slot_that_is_not_supervised_contributes_nothing():
    """UC-107: other labels in dropped slots and a whole dropped block change no gradient."""
    target = toy_target()
    drafter = trainable_drafter(target)
    item = answer(0, prompt=[5, 6], ids=list(range(7, 16)))
    batch = batch_of(target, [item], [[2, 4, 6]])
    kept = replace(batch, valid_AK=batch.valid_AK.clone())
    kept.valid_AK[1] = False
    rows_N = kept.valid_AK.flatten().nonzero().flatten()
    is_kept_N = torch.isin(batch.rows_N, rows_N)
    dropped = replace(kept, rows_N=rows_N, last_ND=batch.last_ND[is_kept_N])
    garbage = replace(dropped, labels_AK=batch.labels_AK.clone())
    garbage.labels_AK[1] = 46
    without = batch_of(target, [item], [[2, 6]])
    normaliser = weight_sum(without)
    assert weight_sum(garbage) == pytest.approx(normaliser)
    expected, wanted = gradients(drafter, [without], normaliser=normaliser)
    found, got = gradients(drafter, [garbage], normaliser=normaliser)
    assert found == pytest.approx(expected, abs=1e-6)
    assert_same(wanted, got)


def test_a_block_sees_nothing_at_or_behind_its_anchor():
    """UC-105: changing the taps of the anchor and later ones changes no loss."""
    target = toy_target()
    drafter = trainable_drafter(target)
    item = answer(0, prompt=[5, 6], ids=list(range(7, 16)))
    batch = batch_of(target, [item], [[2, 6]])
    normaliser = weight_sum(batch)
    taps_TM = batch.taps_TM.clone()
    assert len(taps_TM) == 6  # nothing from the last anchor on is even there
    taps_TM[2:] += 5.0
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(), target_head=log_sum_exp_of(target)
    )
    before = objective(batch, normaliser=normaliser, input_scale_M=None).head.l1_N
    changed = replace(batch, taps_TM=taps_TM)
    after = objective(changed, normaliser=normaliser, input_scale_M=None).head.l1_N
    assert before is not None
    assert after is not None
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


@pytest.mark.parametrize(("stop_gradient", "reaches"), [(False, True), (True, False)])
def test_the_confidence_gradient_reaches_the_backbone_unless_stopped(
    stop_gradient: bool, reaches: bool
):
    """UC-109: with only the confidence term active."""
    target = toy_target()
    drafter = trainable_drafter(target)
    batch = batch_of(target, random_answers(3, vocab_size=47), [[5], [5], [5]])
    weights = losses.LossWeights(ce=0.0, l1=0.0)
    _, found = gradients(
        drafter, [batch], normaliser=1.0, weights=weights, stop_gradient=stop_gradient
    )
    backbone = [t for name, t in found.items() if not name.startswith("confidence_head")]
    assert any(bool(tensor.abs().max() > 0) for tensor in backbone) is reaches
    assert bool(found["confidence_head.proj.weight"].abs().max() > 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False},
    ],
)
def test_a_drafter_without_one_of_the_heads_trains(changes: dict[str, Any]):
    """UC-110."""
    target = toy_target()
    drafter = trainable_drafter(target, **changes)
    batch = batch_of(target, random_answers(3, vocab_size=47), [[5], [5], [5]])
    loss, found = gradients(drafter, [batch], normaliser=1.0)
    assert loss > 0
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


def test_cross_entropy_alone_reads_no_state_of_the_target():
    """UC-110: the last hidden states may be absent."""
    target = toy_target()
    drafter = trainable_drafter(target, enable_confidence_head=False)
    full = batch_of(target, random_answers(3, vocab_size=47), [[5], [5], [5]])
    batch = replace(full, last_ND=torch.empty(0, 0))
    weights = losses.LossWeights(ce=1.0, l1=0.0, confidence=0.0)
    loss, _ = gradients(drafter, [batch], normaliser=1.0, weights=weights)
    expected, _ = gradients(drafter, [full], normaliser=1.0, weights=weights)
    assert loss == expected > 0


def test_acceptance_is_summed_by_slot():
    target = toy_target()
    drafter = trainable_drafter(target)
    item = answer(0, prompt=[5, 6], ids=list(range(7, 13)))
    batch = batch_of(target, [item], [[2, 5]])
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(), target_head=log_sum_exp_of(target)
    )
    outcome = objective(batch, normaliser=1.0, input_scale_M=None)
    accepted_K, slots_K = outcome.acceptance_by_slot(4)
    assert slots_K.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert outcome.head.acceptance_N is not None
    rows: Sequence[float] = outcome.head.acceptance_N.tolist()
    assert accepted_K[0].item() == pytest.approx(rows[0] + rows[4])
    assert isinstance(batch.blocks, PackedBlocks)


@pytest.mark.parametrize("kind", ["dpace", "dpace-acceptance"])
def test_weights_that_follow_the_drafter_are_the_same_packed_and_alone(kind: str):
    """UC-111 for D-PACE: the divisor is the number of blocks, the weights stay in their block."""
    target = toy_target()
    drafter = trainable_drafter(target, d2t_S=D2T)
    answers = [
        answer(0, prompt=[5, 6, 7], ids=[8, 9, 10, 11, 12, 13, 14]),
        answer(1, prompt=[20, 21], ids=[22, 23, 24, 25, 26]),
    ]
    whole = batch_of(target, answers, [[3, 5, 8], [2, 4]])
    alone = [
        batch_of(target, [answers[i]], [[a]]) for i, a in ((0, 3), (0, 5), (0, 8), (1, 2), (1, 4))
    ]
    positions = PositionWeights(kind=kind, alpha=0.3)
    packed_loss, packed = gradients(
        drafter, [whole], normaliser=5.0, positions=positions, chunk_rows=3
    )
    alone_loss, one_by_one = gradients(drafter, alone, normaliser=5.0, positions=positions)
    assert packed_loss == pytest.approx(alone_loss, abs=1e-6)
    assert_same(packed, one_by_one)
    objective = Objective(
        slot_pass_of(drafter),
        config=ObjectiveConfig(positions=positions),
        target_head=log_sum_exp_of(target),
    )
    assert objective.normaliser(whole) == 5.0


def test_the_curriculum_moves_from_the_base_logits_to_the_corrected_ones():
    """Domino: (1 - share) with the sequential head plus share without it; share falls to 0."""
    target = toy_target()
    drafter = trainable_drafter(target, enable_confidence_head=False)
    assert drafter.markov_head is not None
    drafter.markov_head.markov_w2.weight.data *= 100.0
    batch = batch_of(target, random_answers(3, vocab_size=47), [[5], [5], [5]])

    def loss_at(progress: float, **options: Any) -> float:
        objective = Objective(
            slot_pass_of(drafter),
            config=ObjectiveConfig(**options),
            target_head=log_sum_exp_of(target),
        )
        arguments = {"normaliser": 1.0, "input_scale_M": None}
        return objective(batch, progress=progress, **arguments).loss.item()

    corrected = loss_at(0.0)
    base = loss_at(0.0, base_weight=1.0)
    assert abs(base - corrected) > 1e-3
    half = loss_at(0.25, base_weight=1.0, base_until=0.5)
    assert half == pytest.approx(0.5 * (base + corrected), rel=1e-5)
    assert loss_at(0.5, base_weight=1.0, base_until=0.5) == pytest.approx(corrected, rel=1e-6)
