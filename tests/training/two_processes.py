"""One of several processes that train the toy drafter together, told apart as torchrun does it.

    torchrun --nproc-per-node 2 -m tests.training.two_processes FOLDER

The first rank writes what it saw to FOLDER/results.json.
"""

import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch

from dspark.data.answers import Answer
from dspark.data.batches import AnswerBatches, BatchConfig
from dspark.data.hidden_states import OnlineStates
from dspark.data.remote_states import RemoteStates, StateSizes, serve_states
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig
from dspark.training.ranks import Group, Ranks, launched
from dspark.training.state_start import start_from_states
from dspark.training.trainer import TrainConfig, Trainer
from tests.data.toy_answers import answer, random_answers
from tests.toys import toy_target
from tests.training.toy_training import (
    BLOCK,
    TAPS,
    log_sum_exp_of,
    toy_batches,
    trainable_drafter,
)

CONFIG: dict[str, Any] = {
    "steps": 4,
    "validate_every": 2,
    "checkpoint_every": 2,
    "is_compiled": False,
}


def run_toy(
    folder: Path,
    *,
    group: Group | None,
    parallel: str = "ddp",
    answers: list[Answer],
    **batches: Any,
) -> dict[str, Any]:
    """Losses, held-out tau and final weights of a run."""
    target, losses = toy_target(), []
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
    trainer = Trainer(
        trainable_drafter(target),
        batches=toy_batches(target, answers, rank=rank, num_ranks=num_ranks, **batches),
        config=TrainConfig(**CONFIG, parallel=parallel),
        folder=folder,
        target_head=log_sum_exp_of(target),
        ranks=group,
        on_step=lambda report: losses.append(report.loss),
    )
    summary = trainer.run()
    weights = {name: tensor.tolist() for name, tensor in trainer.best_masters().items()}
    return {"losses": losses, "tau": summary.held_out_tau, "weights": weights}


def weights_at_start(answers: list[Answer], *, ranks: Ranks) -> dict[str, Any]:
    """A drafter that starts from least squares on the states of the first steps."""
    target = toy_target()
    drafter = trainable_drafter(target, num_hidden_layers=2)
    batches = toy_batches(
        target, answers, rank=ranks.rank, num_ranks=ranks.size, micro_batches=2, num_held_out=0
    )
    start_from_states(drafter, map(batches.step, count()), ranks=ranks)
    return {name: weight.tolist() for name, weight in drafter.named_parameters()}


def remote_and_online(answers: list[Answer], *, rank: int) -> dict[str, Any]:
    """Losses of some steps with the target here, and with the target in the second process."""
    target = toy_target()
    if rank == 1:
        return {"served": serve_states(target, tap_layers=TAPS, trainers=[0])}
    drafter = trainable_drafter(target)
    objective = Objective(
        slot_pass_of(drafter), config=ObjectiveConfig(), target_head=log_sum_exp_of(target)
    )
    sizes = StateSizes(tap_size=64, hidden_size=32, dtype=torch.float32)
    remote = RemoteStates(worker=1, sizes=sizes)
    config = BatchConfig(block_size=BLOCK, answers_per_step=4, num_held_out=4, micro_batches=2)
    losses: dict[str, list[float]] = {}
    for name, source in (("online", OnlineStates(target, tap_layers=TAPS)), ("remote", remote)):
        batches = AnswerBatches(answers, source=source, config=config)
        steps = [*batches.step(0), *batches.held_out(), *batches.step(1)]
        losses[name] = [
            objective(batch, normaliser=7.0, input_scale_M=None).loss.item() for batch in steps
        ]
    remote.close()
    return {
        **losses,
        "tokens": remote.num_tokens,
        "bytes_per_token": sizes.bytes_per_token,
    }


def main(folder: Path) -> None:
    """Every case in turn, so that starting processes is paid for once."""
    torch.set_num_threads(1)
    many = random_answers(24, vocab_size=47)
    few = [answer(i, prompt=[5, 6], ids=[7, 8 + i, 9]) for i in range(2)]
    with launched():
        group = Group()
        results = {
            "ddp": run_toy(folder / "ddp", group=group, answers=many, micro_batches=2),
            "fsdp2": run_toy(
                folder / "fsdp2", group=group, parallel="fsdp2", answers=many, micro_batches=2
            ),
            # one answer a step: the second rank never has anything to train on
            "idle": run_toy(
                folder / "idle", group=group, answers=few, num_held_out=0, answers_per_step=1
            ),
            "idle fsdp2": run_toy(
                folder / "idle-fsdp2",
                group=group,
                parallel="fsdp2",
                answers=few,
                num_held_out=0,
                answers_per_step=1,
            ),
        }
        results["start"] = weights_at_start(many, ranks=group)
        results["remote"] = remote_and_online(many, rank=group.rank)
        if group.rank == 0:
            (folder / "results.json").write_text(json.dumps(results))


def as_rank(folder: Path, rank: int, size: int, port: int) -> None:
    """What torchrun would have done before `main`."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    main(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
