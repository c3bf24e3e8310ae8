"""Intervals over prompts: coverage, and what they resample."""

import pytest
import torch

from dspark.algorithms.bootstrap import (
    mean_ratio_interval,
    ratio_interval,
    speed_ratio_interval,
)


def test_prompts_that_agree_have_an_interval_of_no_width() -> None:
    found = ratio_interval([4.0, 8.0, 2.0], [2.0, 4.0, 1.0])
    assert found is not None
    assert (found.low, found.high) == (2.0, 2.0)
    assert ratio_interval([4.0], [2.0]) is None
    assert mean_ratio_interval([([4.0], [2.0])]) is None


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """300 experiments of 40 prompts whose tau varies; 95% within four standard errors."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for seed in range(300):
        wholes = torch.randint(5, 50, (40,), generator=generator).double()
        noise = 0.4 * torch.randn(40, generator=generator, dtype=torch.float64)
        found = ratio_interval(((2.0 + noise) * wholes).tolist(), wholes.tolist(), seed=seed)
        assert found is not None
        hits += found.low <= 2.0 <= found.high
    assert 0.89 <= hits / 300 <= 0.99


def test_a_longer_prompt_weighs_more() -> None:
    found = ratio_interval([100.0, 1.0, 100.0, 1.0], [25.0, 1.0, 25.0, 1.0])
    assert found is not None
    assert found.low == pytest.approx(1.0, abs=0.1) or found.low > 1.0
    assert found.high == pytest.approx(4.0, abs=0.1)
    assert found.half_width == pytest.approx((found.high - found.low) / 2)


def test_tasks_weigh_the_same_and_prompts_stay_in_their_task() -> None:
    tasks = [([2.0, 2.0], [1.0, 1.0]), ([40.0, 40.0], [10.0, 10.0])]
    found = mean_ratio_interval(tasks)
    assert found is not None
    assert (found.low, found.high) == (3.0, 3.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    parts = torch.rand(12, generator=torch.Generator().manual_seed(0)).tolist()
    wholes = [1.0] * 12
    assert ratio_interval(parts, wholes) == ratio_interval(parts, wholes)
    assert ratio_interval(parts, wholes, seed=1) != ratio_interval(parts, wholes)


def test_a_speed_ratio_draws_both_measurements_of_a_prompt_together() -> None:
    """Prompts differ tenfold in speed, but each is twice as fast: the ratio is certain."""
    counts, seconds = [10.0, 10.0, 10.0, 10.0], [1.0, 3.0, 10.0, 5.0]
    twice = [value / 2 for value in seconds]
    found = speed_ratio_interval(counts, twice, counts, seconds)
    assert found is not None
    assert found.low == pytest.approx(2.0)
    assert found.high == pytest.approx(2.0)
    assert speed_ratio_interval([1.0], [1.0], [1.0], [1.0]) is None
