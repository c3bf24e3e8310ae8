"""The operators of a plan against the arrays that they stand for, tie for tie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.calibration import scaled_survival
from dspark.algorithms.prefix_scheduler import free_gain, priced
from dspark.kernels import extension
from dspark.kernels.planning import best_prefixes, priced_prefixes, survivals


def block(num_requests: int, size: int, *, grain: int, seed: int) -> np.ndarray:
    """Survivals of which many are equal, some 0: a confidence is one of `grain` + 1."""
    rng = np.random.default_rng(seed)
    confidence_RK = rng.integers(0, grain + 1, (num_requests, size)) / np.float32(grain)
    return np.cumprod(confidence_RK, axis=1, dtype=np.float32)


BLOCKS = st.builds(
    block,
    st.integers(1, 40),
    st.integers(1, 9),
    grain=st.sampled_from([1, 2, 4, 1000]),
    seed=st.integers(0, 999),
)


def caps_of(survival_RK: np.ndarray, seed: int) -> list[int]:
    num_requests, size = survival_RK.shape
    return np.random.default_rng(seed).integers(0, size + 2, num_requests).tolist()


@given(survival_RK=BLOCKS, worth=st.sampled_from([0.0, 0.5, 2.0, 1e6]), seed=st.integers(0, 99))
def test_the_best_prefixes_are_those_of_the_arrays(instructions, survival_RK, worth, seed) -> None:
    caps, rng = caps_of(survival_RK, seed), np.random.default_rng(seed)
    num_budgets = rng.integers(1, survival_RK.size + 2)  # a table may end before the block does
    seconds_B = rng.choice([0.0, 0.1, 0.125, 0.5], num_budgets).cumsum()
    expected_R = free_gain(survival_RK, np.array(caps), seconds_B=seconds_B, worth=worth)
    found = best_prefixes(survival_RK, caps, seconds_B=seconds_B, worth=worth)
    assert found == expected_R.tolist()


@given(survival_RK=BLOCKS, price=st.sampled_from([0.0, 0.25, 0.3, 1.0]), seed=st.integers(0, 99))
def test_the_priced_prefixes_are_those_of_the_arrays(instructions, survival_RK, price, seed):
    caps = caps_of(survival_RK, seed)
    for most in {0, 1, survival_RK.size // 3, survival_RK.size // 2, survival_RK.size}:
        expected_R = priced(survival_RK, np.array(caps), price=price, most=most)
        assert priced_prefixes(survival_RK, caps, price=price, most=most) == expected_R.tolist()


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 9)),
    is_shared=st.booleans(),
    seed=st.integers(0, 999),
)
def test_survivals_are_those_of_the_arrays(instructions, shape, is_shared, seed) -> None:
    rng = np.random.default_rng(seed)
    logits_RK = rng.normal(0.0, 5.0, shape).astype(np.float32)
    own = shape[1:] if is_shared else shape
    scale, bias = (rng.uniform(0.0, 2.0, own).astype(np.float32) for _ in range(2))
    expected_RK = scaled_survival(logits_RK, scale, bias)
    found_RK = survivals(logits_RK, scale, bias)
    assert found_RK.dtype == np.float32
    np.testing.assert_allclose(found_RK, expected_RK, rtol=1e-5, atol=1e-30)
    assert (np.diff(found_RK, axis=1) <= 0.0).all()


def test_nothing_survives_a_logit_that_is_no_number(instructions) -> None:
    logits_RK = np.array([[2.0, np.nan, 5.0], [-np.inf, 1.0, 1.0], [np.inf, 300.0, -300.0]])
    one, none = np.ones(3, dtype=np.float32), np.zeros(3, dtype=np.float32)
    found_RK = survivals(logits_RK.astype(np.float32), one, none)
    assert found_RK[0].tolist() == [pytest.approx(0.8807971), 0.0, 0.0]
    assert found_RK[1].max() < 1e-30
    assert found_RK[2, :2].tolist() == [1.0, 1.0]
    assert found_RK[2, 2] < 1e-30


def test_without_operators_the_arrays_themselves_run(monkeypatch) -> None:
    survival_RK, caps, seconds_B = block(30, 7, grain=4, seed=0), [7] * 30, np.linspace(0, 1, 211)
    ways = []
    for is_loaded in (extension.IS_LOADED, False):
        monkeypatch.setattr(extension, "IS_LOADED", is_loaded)
        ways.append(
            (
                best_prefixes(survival_RK, caps, seconds_B=seconds_B, worth=30.0),
                priced_prefixes(survival_RK, caps, price=0.25, most=20),
                survivals(survival_RK, *np.ones((2, 7), dtype=np.float32)).round(5).tolist(),
            )
        )
    assert ways[0] == ways[1]
    assert 0 < sum(ways[0][0]) < 210


def test_what_does_not_fit_is_refused(instructions) -> None:
    survival_RK = block(4, 3, grain=4, seed=0)
    with pytest.raises(RuntimeError, match="caps must be a byte for each of the 4 requests"):
        best_prefixes(survival_RK, [3] * 3, seconds_B=np.ones(13), worth=1.0)
    with pytest.raises(RuntimeError, match="do not fit logits"):
        survivals(survival_RK, *np.ones((2, 5), dtype=np.float32))
