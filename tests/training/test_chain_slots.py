"""Training-time test of chains: what is trained is what is served, and it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.algorithms.losses import LossWeights
from dspark.core import SamplingParams
from dspark.llm import LLM
from dspark.models.chain import ChainDrafter
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target
from dspark.training.chain_slots import ChainSlots
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig
from dspark.training.optimizer import OptimizerConfig
from dspark.training.trainer import StepReport, TrainConfig, Trainer
from tests.data.toy_answers import answer, greedy_answer
from tests.engine.test_chain_pass import KINDS, dense_chain
from tests.toys import VOCAB_SIZE, toy_chain, toy_target
from tests.training.toy_training import batch_of, log_sum_exp_of, toy_batches

ANSWERS = [
    answer(0, prompt=[5, 6, 7], ids=[8, 9, 10, 11, 12, 13, 14]),
    answer(1, prompt=[20, 21], ids=[22, 23, 24, 25, 26]),
]
ANCHORS = [[3, 5, 8], [2, 4]]


def trainable(target: Target, kind: DrafterKind, **changes: Any) -> ChainDrafter:
    return toy_chain(target, kind, **changes).requires_grad_()


@KINDS
@pytest.mark.parametrize(
    "changes", [{}, {"layer_windows": (3,)}, {"has_head_norms": False, "d2t_S": torch.arange(20)}]
)
def test_every_slot_equals_what_serving_computes_there(kind: DrafterKind, changes: dict[str, Any]):
    """UC-105: positions, tokens, states and who sees whom, against a dense chain."""
    target = toy_target()
    drafter = toy_chain(target, kind, **changes)
    taps = drafter.config.target_layer_ids
    batch = batch_of(target, ANSWERS, ANCHORS, taps=taps)
    slots = ChainSlots(drafter).slots(batch, batch.taps_TM)
    logits_NS = drafter.base_logits(slots.hidden_ND)
    rows = iter(zip(batch.rows_N.tolist(), logits_NS, strict=True))
    block = 0
    for item, chosen in zip(ANSWERS, ANCHORS, strict=True):
        ids = item.ids().tolist()
        for anchor in chosen:
            dense = dense_chain(drafter, target, ids[: anchor + 1], [*ids[anchor + 1 :], 0, 0, 0])
            for slot in range(4):
                if batch.valid_AK[block, slot]:
                    row, logits_S = next(rows)
                    assert row == block * 4 + slot
                    torch.testing.assert_close(logits_S, dense[slot], atol=1e-4, rtol=1e-4)
            block += 1
    assert next(rows, None) is None


@KINDS
def test_packed_blocks_equal_one_block_at_a_time(kind: DrafterKind):
    """UC-114: losses and all gradients."""
    target = toy_target()
    drafter = trainable(target, kind, d2t_S=torch.arange(3, VOCAB_SIZE, 2))
    taps = drafter.config.target_layer_ids
    whole = batch_of(target, ANSWERS, ANCHORS, taps=taps)
    alone = [
        batch_of(target, [item], [[anchor]], taps=taps)
        for item, chosen in zip(ANSWERS, ANCHORS, strict=True)
        for anchor in chosen
    ]
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(), target_head=log_sum_exp_of(target)
    )
    normaliser = objective.normaliser(whole)

    def gradients(batches: list[Any]) -> tuple[float, dict[str, Tensor]]:
        drafter.zero_grad()
        total = 0.0
        for batch in batches:
            loss = objective(batch, normaliser=normaliser, input_scale_M=None).loss
            loss.backward()
            total += loss.item()
        return total, {
            n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None
        }

    one_loss, one = gradients([whole])
    other_loss, other = gradients(alone)
    assert one_loss == pytest.approx(other_loss, abs=1e-6)
    assert one.keys() == other.keys() == dict(drafter.named_parameters()).keys()
    for name, tensor in one.items():
        assert float(tensor.abs().max()) > 0
        torch.testing.assert_close(tensor, other[name], atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [(DrafterKind.EAGLE3, 4), (DrafterKind.MTP, 1), (DrafterKind.MTP, 3)],
)
def test_a_chain_learns_a_repeating_text_and_serves_it(
    tmp_path: Path, kind: DrafterKind, block_size: int
):
    """UC-105: the loss falls, the estimate rises, and the engine accepts what is drafted."""
    target = toy_target(scale=60.0)
    answers = [greedy_answer(target, n, prompt=[3 + n, 4], length=40) for n in range(4)]
    drafter = trainable(target, kind, block_size=block_size)
    seen: list[StepReport] = []
    trainer = Trainer(
        drafter,
        batches=toy_batches(
            target,
            answers,
            taps=drafter.config.target_layer_ids,
            block_size=block_size,
            num_held_out=0,
            tokens_per_anchor=1.0,
        ),
        config=TrainConfig(
            steps=100,
            validate_every=100,
            checkpoint_every=100,
            is_compiled=False,
            objective=ObjectiveConfig(weights=LossWeights(ce=0.1, l1=0.9, confidence=0.0)),
            optimizer=OptimizerConfig(muon_lr=0.01, adam_lr=0.01),
        ),
        folder=tmp_path,
        target_head=log_sum_exp_of(target),
        on_step=seen.append,
    )
    trainer.run()
    assert seen[-1].loss < 0.15 * seen[0].loss
    first, last = (sum(r.accepted_K) / sum(r.slots_K) for r in (seen[0], seen[-1]))
    assert first < 0.2 < 0.8 < last
    llm = LLM(target, drafter=drafter.requires_grad_(requires_grad=False))
    completions = llm.generate(
        [list(item.prompt_token_ids) for item in answers],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    )
    for completion, item in zip(completions, answers, strict=True):
        assert list(completion.token_ids) == list(item.token_ids)
    accepted = sum(completion.stats.acceptance.num_accepted for completion in completions)
    planned = sum(completion.stats.acceptance.num_planned for completion in completions)
    assert accepted / planned > 0.95
