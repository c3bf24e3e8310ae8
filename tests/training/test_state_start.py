"""A backbone that starts from least squares is better than noise."""

from itertools import count

import pytest
import torch
from torch import Tensor

from dspark.data.answers import Answer
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig
from dspark.training.ranks import OneProcess
from dspark.training.state_start import start_from_states
from dspark.training.validation import Validation, validate
from tests.data.toy_answers import random_answers
from tests.toys import VOCAB_SIZE, toy_target
from tests.training.toy_training import log_sum_exp_of, toy_batches, trainable_drafter

LAYERS = {"num_hidden_layers": 2}


def started(target: Target, **changes: object) -> Drafter:
    drafter = trainable_drafter(target, **LAYERS, **changes)
    batches = toy_batches(target, toy_rows())
    start_from_states(drafter, map(batches.step, count()), ranks=OneProcess())
    return drafter


def toy_rows() -> list[Answer]:
    return random_answers(80, vocab_size=VOCAB_SIZE - 1)


def held_out(drafter: Drafter, target: Target) -> Validation:
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(), target_head=log_sum_exp_of(target)
    )
    found = validate(objective, toy_batches(target, toy_rows()).held_out(), input_scale_M=None)
    assert found is not None
    return found


@pytest.mark.parametrize("changes", [{}, {"markov_rank": 0, "confidence_head_with_markov": False}])
def test_it_accepts_more_than_noise_on_answers_it_has_not_seen(changes: dict[str, object]) -> None:
    target = toy_target()
    noise = held_out(trainable_drafter(target, **LAYERS, **changes), target)
    found = held_out(started(target, **changes), target)
    assert found.tau > noise.tau + 0.05
    assert found.acceptance_K[0] > 1.15 * noise.acceptance_K[0]


def test_the_heads_of_the_first_slot_look_at_the_end_of_the_context() -> None:
    """Heads of 32: those of 8 have too few rotations to tell neighbours apart."""
    target = toy_target()
    drafter = started(target, head_dim=32)
    (batch,) = toy_batches(target, toy_rows(), tokens_per_anchor=100, answers_per_step=64).step(0)
    blocks = batch.blocks  # one block each
    kept: list[Tensor] = []

    def attend(_layer: int, q_XHE: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
        kept.append(q_XHE)
        return q_XHE

    layer = drafter.decoder_layers()[0]
    normed_XD = layer.input_layernorm(drafter.block_inputs(batch.previous_AK[:, 0]))
    layer.self_attn(normed_XD, *drafter.rotary.angles(blocks.positions_N), attend)
    first_AHE = kept[0][:: blocks.block_size]
    keys_TGE = drafter.context_kv(drafter.context(batch.taps_TM), blocks.context_positions_T)[0][0]
    distances = []
    for q_HE, k_TGE in zip(
        first_AHE, torch.split(keys_TGE, list(blocks.context_lengths)), strict=True
    ):
        if len(k_TGE) >= 6:
            scores_GT = torch.einsum("GE,TGE->GT", q_HE[::2], k_TGE)
            distances.append(len(k_TGE) - scores_GT.argmax(dim=1))
    assert len(distances) > 10
    is_last = (torch.stack(distances) == 1).float()
    assert is_last.mean() > 0.9  # a rare embedding has next to nothing in common with the others
