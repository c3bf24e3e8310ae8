from pathlib import Path

import pytest

from dspark.benchmarks.training import TrainBenchConfig, measure
from dspark.errors import InputError


def test_both_steps_have_the_same_loss_on_the_same_blocks(model_dir: Path):
    """The straight port shares no loss code with the trainer: an independent reference."""
    config = TrainBenchConfig(
        target=str(model_dir),
        dtype="fp32",
        num_samples=2,
        prompt_tokens=5,
        answer_tokens=12,
        num_layers=1,
        block_size=3,
        rank=4,
        num_anchors=16,
        repeats=1,
        is_compiled=False,
    )
    ours, theirs = measure("ours", config), measure("deepspec", config)
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert ours["loss_fp32"] == pytest.approx(theirs["loss_fp32"], abs=1e-4)
    assert ours["supervised_tokens"] == theirs["supervised_tokens"] == 2 * (9 * 3 + 2 + 1)
    assert ours["step_memory_bytes"] >= 1
    assert ours["tokens_per_s"] > 0


def test_amounts_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="only 16 anchors are drawn"):
        TrainBenchConfig(answer_tokens=100, num_anchors=16)
    with pytest.raises(InputError, match="num_samples is 0, but it must be at least 1"):
        TrainBenchConfig(num_samples=0)
