"""Runs that a real kill -9 ends at a chosen event: before a write, a sync, a rename or a step.

Each runs in a forked process. Events are counted, not timed, so that a moment is the same one on
every machine.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark.data.batches import AnswerBatches, BatchConfig
from dspark.data.cache_fill import fill_cache
from dspark.data.states_cache import StatesCache, StatesWriter
from dspark.training.optimizer import OptimizerConfig
from dspark.training.trainer import TrainConfig, Trainer
from tests.data.toy_answers import random_answers
from tests.data.toy_caches import toy_format
from tests.toys import VOCAB_SIZE, toy_target
from tests.training.toy_training import BLOCK, log_sum_exp_of, trainable_drafter

ANSWERS = random_answers(24, vocab_size=VOCAB_SIZE - 1)


class Events:
    """Counts what changes the disk; at the chosen number the process is gone."""

    def __init__(self, die_at: int | None) -> None:
        self.count = 0
        self._die_at = die_at

    def happen(self) -> None:
        self.count += 1
        if self.count == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.happen()
            return function(*arguments, **options)

        return call

    def watch(self) -> None:
        """In this process, which does nothing else."""
        os.fsync = self.before(os.fsync)  # type: ignore[assignment]
        os.truncate = self.before(os.truncate)  # type: ignore[assignment]
        Path.replace = self.before(Path.replace)  # type: ignore[method-assign]
        StatesWriter._write = self.before(StatesWriter._write)  # type: ignore[method-assign]


def fill(folder: Path, die_at: int | None) -> None:
    """Fill a cache; the number of events goes to `events`."""
    torch.set_num_threads(1)
    events = Events(die_at)
    events.watch()
    fill_cache(
        toy_target(),
        ANSWERS,
        folder / "states",
        format=toy_format(),
        tokens_per_pass=20,
        passes_per_flush=2,
    )
    (folder / "events").write_text(str(events.count))


def train(folder: Path, die_at: int | None) -> None:
    """Train from a full cache in `folder`/states; each loss goes to `losses` at once."""
    torch.set_num_threads(1)
    target, events = toy_target(), Events(die_at)
    events.watch()

    def on_step(report: Any) -> None:
        with (folder / "losses").open("a") as file:
            file.write(json.dumps([report.step, report.loss]) + "\n")
        events.happen()

    Trainer(
        trainable_drafter(target),
        batches=AnswerBatches(
            ANSWERS,
            source=StatesCache(folder / "states"),
            config=BatchConfig(block_size=BLOCK, answers_per_step=4, num_held_out=4),
        ),
        config=TrainConfig(
            steps=24,
            validate_every=4,
            checkpoint_every=2,
            is_compiled=False,
            optimizer=OptimizerConfig(muon_lr=0.01, adam_lr=0.01),
        ),
        folder=folder / "run",
        target_head=log_sum_exp_of(target),
        on_step=on_step,
    ).run()
    (folder / "events").write_text(str(events.count))
