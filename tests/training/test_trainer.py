import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.core import SamplingParams
from dspark.data.batches import Batch
from dspark.data.on_policy import OnPolicyBatches
from dspark.errors import CapacityError, InputError, ModelError, NumericsError
from dspark.llm import LLM
from dspark.training import snapshot
from dspark.training import trainer as trainer_module
from dspark.training.optimizer import OptimizerConfig
from dspark.training.trainer import StepReport, TrainConfig, Trainer
from dspark.training.validation import Validation
from tests.data.toy_answers import greedy_answer, random_answers
from tests.toys import toy_drafter, toy_target
from tests.training.toy_training import (
    BLOCK,
    log_sum_exp_of,
    toy_batches,
    toy_trainer,
    trainable_drafter,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "toy_training.txt"


def config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "validate_every": 5,
        "checkpoint_every": 4,
        "is_compiled": False,
        "optimizer": OptimizerConfig(muon_lr=0.01, adam_lr=0.01),
    }
    if "minutes" not in changes:
        values["steps"] = 20
    return TrainConfig(**{**values, **changes})


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


def losses_of(trainer_options: dict[str, Any], folder: Path, *, dies_at: int | None = None):
    """Loss by step of one process, up to its kill or the end."""
    seen: dict[int, float] = {}

    def on_step(report: StepReport) -> None:
        seen[report.step] = report.loss
        if report.step == dies_at:
            raise Killed

    trainer = toy_trainer(folder, on_step=on_step, **trainer_options)
    if dies_at is None:
        trainer.run()
    else:
        with pytest.raises(Killed):
            trainer.run()
    return seen, trainer


def test_a_killed_run_repeats_the_loss_curve_and_ends_with_the_same_weights(tmp_path: Path):
    """UC-118: killed twice, once with half a checkpoint on the disk; bit for bit, in bf16 too."""
    for dtype in (torch.float32, torch.bfloat16):
        target = toy_target()
        options = [
            {"config": config(), "drafter": trainable_drafter(target).to(dtype)} for _ in range(4)
        ]
        straight, whole = losses_of(options[0], tmp_path / f"straight-{dtype}")
        folder = tmp_path / f"killed-{dtype}"
        first, _ = losses_of(options[1], folder, dies_at=7)
        (folder / "training.pt.tmp").write_bytes(b"half a check")
        second, _ = losses_of(options[2], folder, dies_at=14)
        third, resumed = losses_of(options[3], folder)
        assert [min(second), min(third), max(third)] == [5, 13, 20]
        assert {**first, **second, **third} == straight
        for one, other in zip(
            whole.drafter.parameters(), resumed.drafter.parameters(), strict=True
        ):
            assert torch.equal(one, other)


def test_a_finished_run_is_not_trained_again(tmp_path: Path):
    straight, _ = losses_of({"config": config()}, tmp_path)
    again, trainer = losses_of({"config": config()}, tmp_path)
    assert len(straight) == 20
    assert again == {}
    assert trainer.run().steps == 20


def test_a_resumed_run_must_be_the_same_run(tmp_path: Path):
    losses_of({"config": config()}, tmp_path)
    with pytest.raises(ModelError, match="another training configuration"):
        toy_trainer(tmp_path, config=config(steps=30)).run()
    more = toy_batches(toy_target(), random_answers(25, vocab_size=47))
    with pytest.raises(ModelError, match="another set of answers"):
        toy_trainer(tmp_path, config=config(), batches=more).run()
    other = trainable_drafter(toy_target(), markov_rank=4)
    with pytest.raises(ModelError, match="another drafter configuration"):
        toy_trainer(tmp_path, config=config(), drafter=other).run()
    toy_trainer(tmp_path, config=config(validate_every=7, checkpoint_every=3)).run()


def test_a_damaged_checkpoint_is_named(tmp_path: Path):
    losses_of({"config": config(steps=2)}, tmp_path)
    file = tmp_path / "training.pt"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"training\.pt cannot be read"):
        toy_trainer(tmp_path, config=config(steps=2)).run()


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "training.pt"
    snapshot.write_snapshot(file, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot.os, "fsync", full)
    with pytest.raises(CapacityError, match="No space left"):
        snapshot.write_snapshot(file, {"step": 2})
    monkeypatch.undo()
    assert snapshot.read_snapshot(file) == {"step": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_minutes_become_steps_once_and_the_timing_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A clock by which each step takes a second; the run goes on with the steps it chose then."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: float(next(seconds)))
    first, _ = losses_of({"config": config(minutes=0.2)}, tmp_path / "minutes", dies_at=5)
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: 0.0)
    second, _ = losses_of({"config": config(minutes=0.2)}, tmp_path / "minutes")
    assert max(second) == 12
    same, _ = losses_of({"config": config(steps=12)}, tmp_path / "steps")
    assert {**first, **second} == same


class Poisoned:
    """Batches of which one holds an infinite tap."""

    def __init__(self, step: int) -> None:
        self.batches = toy_batches(toy_target())
        self.poisoned_step = step

    def step(self, step: int) -> Sequence[Batch]:
        (batch,) = self.batches.step(step)
        if step == self.poisoned_step:
            batch = replace(batch, taps_TM=torch.full_like(batch.taps_TM, float("inf")))
        return [batch]

    def held_out(self):
        return self.batches.held_out()

    def fingerprint(self):
        return self.batches.fingerprint()


def test_a_value_that_is_not_finite_stops_the_run_and_the_checkpoint_stays_good(tmp_path: Path):
    """UC-115: the message names the step; the run goes on from the last good weights."""
    bad = toy_trainer(tmp_path, config=config(), batches=Poisoned(9))
    with pytest.raises(
        NumericsError,
        match=r"step 10 is nan: the target's taps are not finite; the last .* is good",
    ):
        bad.run()
    straight, _ = losses_of({"config": config()}, tmp_path / "straight")
    seen, _ = losses_of({"config": config()}, tmp_path)
    assert min(seen) == 9
    assert seen == {step: straight[step] for step in seen}


def test_an_infinite_gradient_names_tensor_and_step(tmp_path: Path):
    """UC-115."""
    drafter = trainable_drafter(toy_target())
    counts = {"calls": 0}

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return gradient * float("inf") if counts["calls"] == 3 else gradient

    drafter.norm.weight.register_hook(poison)
    trainer = toy_trainer(tmp_path, config=config(), drafter=drafter)
    with pytest.raises(NumericsError, match=r"Step 3: the gradient of norm\.weight is not finite"):
        trainer.run()


def test_the_best_weights_are_kept_not_the_last(tmp_path: Path):
    """UC-116: the run goes astray after step 10."""
    validations: dict[int, float] = {}

    def on_validation(step: int, validation: Validation) -> None:
        validations[step] = validation.tau
        if step == 10:
            with torch.no_grad():
                for master in trainer._optimizer.masters.values():
                    master.normal_(generator=torch.Generator().manual_seed(0))

    trainer = toy_trainer(tmp_path, config=config(), on_validation=on_validation)
    summary = trainer.run()
    assert list(validations) == [5, 10, 15, 20]
    assert validations[20] < validations[10]
    assert summary.best_step == max(validations, key=lambda step: validations[step]) <= 10
    assert summary.held_out_tau == validations[summary.best_step]
    assert summary.supervised_tokens > 20 * 4
    assert summary.peak_memory_bytes > 2**20


def test_the_kept_drafter_reads_raw_taps_as_the_trained_one_read_scaled_taps(tmp_path: Path):
    """The feature scale is folded into `fc`: serving knows nothing of it."""
    _, trainer = losses_of({"config": config(steps=5)}, tmp_path)
    (batch,) = toy_batches(toy_target()).step(0)
    scale_M = trainer._input_scale_M
    assert scale_M is not None
    rms_M = (batch.taps_TM * scale_M).square().mean(dim=0).sqrt()
    assert 0.5 < rms_M.min().item() <= rms_M.max().item() < 2.0
    masters = snapshot.read_snapshot(tmp_path / "best.pt")["masters"]
    expected = (batch.taps_TM * scale_M) @ masters["fc.weight"].T
    torch.testing.assert_close(trainer.drafter.fc(batch.taps_TM), expected, atol=1e-4, rtol=1e-4)


def test_a_trained_drafter_goes_on_where_it_was_and_is_kept_if_training_hurts(tmp_path: Path):
    """UC-119: the start is measured on the same held-out answers and must be beaten."""
    _, first = losses_of({"config": config()}, tmp_path / "first")
    tau = first.run().held_out_tau
    trained = [p.detach().clone() for p in first.drafter.parameters()]
    harmful = config(
        steps=3,
        is_continued=True,
        optimizer=OptimizerConfig(muon_lr=30.0, adam_lr=30.0, warmup=0.0),
    )
    seen: dict[int, float] = {}
    again = toy_trainer(
        tmp_path / "second",
        config=harmful,
        drafter=first.drafter,
        on_validation=lambda step, validation: seen.update({step: validation.tau}),
    )
    summary = again.run()
    assert seen[0] == pytest.approx(tau, abs=1e-3)
    assert (summary.best_step, summary.held_out_tau) == (0, seen[0])
    for one, other in zip(again.drafter.parameters(), trained, strict=True):
        torch.testing.assert_close(one.detach(), other, atol=1e-5, rtol=1e-4)
    better = config(steps=30, is_continued=True)
    assert (
        toy_trainer(tmp_path / "third", config=better, drafter=again.drafter).run().held_out_tau
        > tau
    )


def test_without_held_out_answers_the_last_weights_are_kept(tmp_path: Path):
    batches = toy_batches(toy_target(), num_held_out=0)
    summary = toy_trainer(tmp_path, config=config(steps=3), batches=batches).run()
    assert (summary.best_step, summary.held_out_tau) == (3, 0.0)


def test_steps_and_minutes_exclude_each_other():
    with pytest.raises(InputError, match="give exactly one"):
        TrainConfig()
    with pytest.raises(InputError, match="give exactly one"):
        TrainConfig(steps=1, minutes=1.0)
    with pytest.raises(InputError, match="steps is 0"):
        TrainConfig(steps=0)


def test_the_first_twenty_losses_of_a_toy_run(tmp_path: Path):
    """Golden: a refactor repeats them; a numeric change regenerates the file and says why.

    The tolerance is for processors that add products in another order.
    """
    seen, _ = losses_of({"config": config()}, tmp_path)
    golden = [line.split() for line in GOLDEN.read_text().splitlines()]
    assert [int(step) for step, _ in golden] == list(seen)
    assert list(seen.values()) == pytest.approx([float(loss) for _, loss in golden], rel=1e-4)


def test_a_cyclic_sequence_is_learnt_and_served(tmp_path: Path):
    """UC-105: any shift between training and decoding fails here.

    A random target that repeats itself, its own greedy answers; afterwards the engine decodes
    with the trained drafter and accepts more than 95% of what it drafts.
    """
    target = toy_target(scale=60.0)
    answers = [
        greedy_answer(target, number, prompt=[3 + number, 4], length=40) for number in range(4)
    ]
    trainer = Trainer(
        trainable_drafter(target),
        batches=toy_batches(target, answers, num_held_out=0, tokens_per_anchor=1.0),
        config=config(steps=120, validate_every=120, checkpoint_every=120),
        folder=tmp_path,
        target_head=toy_trainer(tmp_path, target, config=config())._objective._target_head,
    )
    trainer.run()
    llm = LLM(target, drafter=trainer.drafter.requires_grad_(requires_grad=False))
    completions = llm.generate(
        [list(answer.prompt_token_ids) for answer in answers],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    )
    for completion, answer in zip(completions, answers, strict=True):
        assert list(completion.token_ids) == list(answer.token_ids)
    accepted = sum(completion.stats.acceptance.num_accepted for completion in completions)
    offered = sum(completion.stats.acceptance.num_planned for completion in completions)
    assert accepted / offered > 0.95
    untrained = LLM(target, drafter=toy_drafter(target, block_size=BLOCK))
    worse = untrained.generate(
        [list(answers[0].prompt_token_ids)],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    )[0].stats.acceptance
    assert worse.num_accepted / worse.num_planned < 0.5


def test_on_policy_steps_train_resume_and_lower_the_loss_on_drafted_states(tmp_path: Path):
    """Draft-OPD: the drafts depend on the weights, so a resumed run draws the same ones."""

    def losses(folder: Path, dies_at: int | None = None) -> dict[int, float]:
        seen: dict[int, float] = {}

        def on_step(report: StepReport) -> None:
            seen[report.step] = report.loss
            if report.step == dies_at:
                raise Killed

        target = toy_target()
        batches = OnPolicyBatches(toy_batches(target), target=target, share=0.5)
        trainer = toy_trainer(
            folder, target, config=config(steps=24), batches=batches, on_step=on_step
        )
        batches.follow(trainer.draft)
        with contextlib.suppress(Killed):
            trainer.run()
        return seen

    straight = losses(tmp_path / "straight")
    first = losses(tmp_path / "killed", dies_at=11)
    second = losses(tmp_path / "killed")
    assert {**first, **second} == straight
    replayed = [straight[step] for step in range(2, 25, 2)]
    assert sum(replayed[-3:]) < sum(replayed[:3])


def test_a_block_of_sixteen_slots_learnt_by_heart_is_accepted_whole(tmp_path: Path):
    """Issue 4: labels, positions, taps and rotary tables are the same in training and serving.

    One answer is learnt until the drafter knows it; served greedily, not one draft is rejected.
    """
    target = toy_target(scale=60.0)
    learnt = greedy_answer(target, 0, prompt=[3, 4, 5], length=52)
    drafter = trainable_drafter(target, block_size=16, num_hidden_layers=2)
    trainer = Trainer(
        drafter,
        batches=toy_batches(
            target,
            [learnt],
            num_held_out=0,
            tokens_per_anchor=1.0,
            block_size=16,
            answers_per_step=1,
        ),
        config=config(steps=110, validate_every=110, checkpoint_every=110),
        folder=tmp_path,
        target_head=log_sum_exp_of(target),
    )
    trainer.run()
    llm = LLM(target, drafter=drafter.requires_grad_(requires_grad=False))
    params = SamplingParams(temperature=0.0, max_tokens=52, ignore_eos=True)
    (completion,) = llm.generate([list(learnt.prompt_token_ids)], params)
    assert list(completion.token_ids) == list(learnt.token_ids)
    found = completion.stats.acceptance
    assert found.num_accepted == found.num_planned >= 45
