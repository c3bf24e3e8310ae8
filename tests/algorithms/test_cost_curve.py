"""Curves: a staircase stays a staircase, noise is levelled, real falls are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.cost_curve import CostCurve
from dspark.errors import ModelError


def make(sizes, seconds, *, padded_up_to: int = 0) -> CostCurve:
    return CostCurve(
        sizes=tuple(sizes),
        seconds=tuple(seconds),
        errors=(0.0,) * len(sizes),
        padded_up_to=padded_up_to,
    )


def test_padded_sizes_run_as_the_next_one_and_others_lie_on_lines():
    curve = make([1, 4, 8, 16, 32], [1.0, 2.0, 3.0, 10.0, 12.0], padded_up_to=8)
    found = curve.at(np.array([0, 1, 2, 4, 5, 8, 9, 16, 24, 32, 40]))
    # nothing is drawn between the last captured size and the first one without a graph
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 10.0, 10.0, 11.0, 12.0, 13.0]


def test_shelves_measured_at_both_ends_stay_shelves():
    """A kernel with tiles of 16 rows: equal up to 16, one jump, equal up to 32."""
    curve = make([1, 16, 17, 32], [5.0, 5.0, 8.0, 8.0])
    assert curve.at(np.arange(1, 41)).tolist() == [5.0] * 16 + [8.0] * 24


def test_a_fully_padded_curve_goes_on_behind_its_end():
    curve = make([8, 16], [1.0, 2.0], padded_up_to=16)
    assert curve.at(np.array([3, 9, 16, 24])).tolist() == [1.0, 2.0, 2.0, 3.0]


def test_a_falling_end_never_makes_larger_sizes_free():
    curve = make([1, 8, 16], [1.0, 5.0, 4.0])
    assert curve.at(np.array([1000])).tolist() == [4.0]


def noisy_samples(sizes, truth, *, count: int = 15, seed: int = 0) -> dict[int, list[float]]:
    rng = np.random.default_rng(seed)
    return {size: list(truth(size) * (1 + 0.01 * rng.standard_normal(count))) for size in sizes}


def test_warm_up_and_outliers_move_entries_by_less_than_a_twentieth():
    """UC-146: the first two samples and a random twentieth of all take fifty times as long."""
    sizes = (1, 2, 4, 8, 16, 32)

    def truth(size: int) -> float:
        return 0.02 + 0.001 * size

    clean = noisy_samples(sizes, truth)
    rng = np.random.default_rng(1)
    spoilt = {
        size: [
            50 * value if i < 2 or rng.random() < 0.05 else value for i, value in enumerate(samples)
        ]
        for size, samples in clean.items()
    }
    curve = CostCurve.of_samples(spoilt)
    for size, seconds, error in zip(curve.sizes, curve.seconds, curve.errors, strict=True):
        assert seconds == pytest.approx(truth(size), rel=0.05)
        assert 0.0 < error < 0.05 * seconds  # the spread is stored
    assert list(curve.seconds) == sorted(curve.seconds)


def test_a_fall_within_noise_is_levelled_and_a_real_one_is_kept():
    noise = CostCurve.of_samples({1: [1.00, 1.02, 0.98], 2: [0.99, 1.01, 0.97], 4: [2.0, 2.0, 2.0]})
    assert noise.seconds[0] == noise.seconds[1] == pytest.approx(0.995)
    # another kernel takes over at 16 and is quicker: that is what the machine does
    real = CostCurve.of_samples({8: [3.0, 3.01, 2.99], 16: [2.0, 2.01, 1.99]})
    assert real.seconds == (3.0, 2.0)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    st.lists(st.floats(0.0, 0.2), min_size=8, max_size=8),
)
def test_levelling_leaves_no_fall_that_noise_explains(medians, spreads):
    samples = {
        size: [median - spread, median, median + spread]
        for size, (median, spread) in enumerate(zip(medians, spreads, strict=False), start=1)
    }
    curve = CostCurve.of_samples(samples)
    assert sum(curve.seconds) == pytest.approx(sum(medians))
    rising = CostCurve.of_samples({n: [float(n)] * 3 for n in range(1, 6)})
    assert rising.seconds == (1.0, 2.0, 3.0, 4.0, 5.0)
    for left, right, a, b in zip(
        curve.seconds, curve.seconds[1:], curve.errors, curve.errors[1:], strict=False
    ):
        assert left <= right or left - right > 3.0 * min(a, b)


def test_json_round_trip():
    curve = make([1, 4], [1.0, 2.0], padded_up_to=4)
    assert CostCurve.from_json(curve.to_json()) == curve


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [4, 1]},
        {"sizes": []},
        {"seconds": [1.0]},
        {"seconds": [1.0, float("nan")]},
        {"seconds": [1.0, -1.0]},
        {"seconds": "fast"},
    ],
)
def test_damaged_curves_are_refused(change):
    data = make([1, 4], [1.0, 2.0]).to_json() | change
    with pytest.raises(ModelError):
        CostCurve.from_json(data)
    with pytest.raises(ModelError):
        CostCurve.from_json({})
