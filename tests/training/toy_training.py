"""A toy run: random answers, toy target online, a small drafter in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.algorithms import anchors
from dspark.data.answers import Answer
from dspark.data.batches import AnswerBatches, Batch, BatchConfig, pack
from dspark.data.hidden_states import OnlineStates
from dspark.models.drafter import Drafter
from dspark.models.target import Target
from dspark.training.objective import TargetHead
from dspark.training.trainer import Trainer
from tests.data.toy_answers import random_answers
from tests.toys import VOCAB_SIZE, toy_drafter, toy_target

BLOCK = 4
TAPS = (0, 1)


def trainable_drafter(target: Target, **changes: Any) -> Drafter:
    return toy_drafter(target, **changes).requires_grad_()


def log_sum_exp_of(target: Target) -> TargetHead:
    return TargetHead(log_sum_exp=lambda last_ND: target.logits(last_ND).float().logsumexp(dim=1))


def toy_batches(
    target: Target,
    answers: Sequence[Answer] | None = None,
    *,
    taps: Sequence[int] = TAPS,
    **changes: Any,
) -> AnswerBatches:
    ranks = {name: changes.pop(name) for name in ("rank", "num_ranks") if name in changes}
    values = {"block_size": BLOCK, "answers_per_step": 4, "num_held_out": 4, **changes}
    return AnswerBatches(
        random_answers(24, vocab_size=VOCAB_SIZE - 1) if answers is None else answers,
        source=OnlineStates(target, tap_layers=taps),
        config=BatchConfig(**values),
        **ranks,
    )


def toy_trainer(folder: Path, target: Target | None = None, **options: Any) -> Trainer:
    target = toy_target() if target is None else target
    options.setdefault("batches", toy_batches(target))
    options.setdefault("target_head", log_sum_exp_of(target))
    drafter = options.pop("drafter", None) or trainable_drafter(target)
    return Trainer(drafter, folder=folder, **options)


def batch_of(
    target: Target,
    answers: Sequence[Answer],
    anchors_of: Sequence[Sequence[int]],
    *,
    taps: Sequence[int] = TAPS,
) -> Batch:
    """A batch with exactly these anchors of these answers."""
    states = OnlineStates(target, tap_layers=taps).read(answers)
    drawn = [
        anchors.blocks(
            answer.ids(), answer.loss_mask(), torch.tensor(list(chosen)), block_size=BLOCK
        )
        for answer, chosen in zip(answers, anchors_of, strict=True)
    ]
    return pack(list(zip(drawn, states, strict=True)), block_size=BLOCK)
