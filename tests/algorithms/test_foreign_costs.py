"""Cost tables of other engines, read as they mean them."""

import numpy as np
import pytest

from dspark.algorithms.foreign_costs import read_cost
from dspark.errors import ModelError
from tests.algorithms.toy_costs import draft_seconds_of, linear_cost, seconds_of


def test_vllm_curves_are_stairs_up_to_the_captured_limit():
    cost = read_cost(
        {
            "draft_curve": [[1, 0.5], [8, 1.0]],
            "verify_curve": [[1, 5.0], [8, 6.0], [16, 8.0], [32, 20.0]],
            "cudagraph_limit": 16,
        },
        block_size=7,
    )
    found = [1e3 * seconds_of(cost, 2, n) for n in (2, 8, 9, 16, 17, 32)]
    assert found == pytest.approx([6.0, 6.0, 8.0, 8.0, 20.0, 20.0])
    assert 1e3 * draft_seconds_of(cost, 3) == pytest.approx(1.0)


def test_sglang_steps_per_second_belong_to_the_probe_at_or_below_a_size():
    cost = read_cost(
        {
            "sample_batch_tokens": [8, 16, 32],
            "sample_steps_per_sec": [1000.0, 500.0, 250.0],
            "max_batch_tokens": 64,
        },
        block_size=7,
    )
    found = [seconds_of(cost, 1, n) for n in (1, 8, 15, 16, 31, 32, 64)]
    assert found == pytest.approx([0.001, 0.001, 0.001, 0.002, 0.002, 0.004, 0.004])
    assert draft_seconds_of(cost, 5) == 0.0


def test_sglang_sums_are_lines_in_both_directions():
    cost = read_cost(
        {
            "bias_seconds": 0.01,
            "bs_probes": [1, 5],
            "alpha_seconds": [0.0, 0.004],
            "m_probes": [1, 11],
            "theta_seconds": [0.0, 0.01],
        },
        block_size=7,
    )
    for requests, tokens in ((1, 1), (3, 6), (5, 11)):
        expected = 0.01 + 0.001 * (requests - 1) + 0.001 * (tokens - 1)
        assert seconds_of(cost, requests, tokens) == pytest.approx(expected)


def test_our_own_format_is_read_too():
    assert read_cost(linear_cost().to_json(), block_size=3) == linear_cost()


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ModelError, match="known are"):
        read_cost({"speed": 3}, block_size=7)
    with pytest.raises(ModelError, match="cannot be read"):
        read_cost({"verify_curve": [[1, 2.0]]}, block_size=7)
    with pytest.raises(ModelError, match="cannot be read"):
        read_cost({"verify_curve": [[1]], "draft_curve": []}, block_size=7)
    zero = {"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0], "max_batch_tokens": 8}
    with pytest.raises(ModelError):
        read_cost(zero, block_size=7)
    assert np.isfinite(seconds_of(linear_cost(), 1, 1))
