"""The search for a kept prefix against the sort that defines it: always the same one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.algorithms import prefix_search
from dspark.algorithms.prefix_search import leading_prefix, prefix_by_sort


def row_of_scores(size: int, spread: float, *, step: float = 0.0, seed: int = 0) -> np.ndarray:
    """Scores with maximum 0; `step` rounds them to its multiples, so that many tie."""
    scores_V = np.random.default_rng(seed).standard_normal(size) * spread
    if step:
        scores_V = np.round(scores_V / step) * step
    return (scores_V - scores_V.max()).astype(np.float32)


@pytest.fixture
def short_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few scores take every branch that long rows take."""
    monkeypatch.setattr(prefix_search, "_SORTED_AT_ONCE", 4)
    monkeypatch.setattr(prefix_search, "_NUM_PARTS", 8)


rows = st.builds(
    row_of_scores,
    size=st.one_of(st.integers(1, 60), st.integers(1, 5000)),
    spread=st.sampled_from([0.0, 1e-3, 0.3, 2.0, 30.0]),
    step=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**31),
)
masses = st.one_of(
    st.just(1.0),
    st.floats(1e-9, 1.0),
    st.sampled_from([0.25, 0.5, 0.75, 0.95]),
    st.floats(0.0, 12.0).map(lambda x: max(0.01, 1.0 - 10.0**-x)),
)


@pytest.mark.usefixtures("short_sorts")
@settings(max_examples=400, deadline=None)
@given(
    scores_V=rows,
    top_k=st.one_of(st.none(), st.integers(1, 70), st.integers(1, 6000)),
    top_p=masses,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    num_banned=st.integers(0, 5000),
)
def test_the_search_finds_what_the_sort_defines(scores_V, top_k, top_p, temperature, num_banned):
    scores_V = scores_V / np.float32(temperature)
    banned = np.random.default_rng(1).permutation(len(scores_V))[:num_banned]
    scores_V[banned[scores_V[banned] < 0]] = -np.inf
    given_V = scores_V.copy()
    found = leading_prefix(scores_V, top_k=top_k, top_p=top_p)
    assert found == prefix_by_sort(given_V, top_k=top_k, top_p=top_p)
    assert np.array_equal(scores_V, given_V)


@pytest.mark.parametrize("spread", [0.01, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("step", [0.0, 0.25])
def test_rows_of_a_real_vocabulary(spread: float, step: float):
    scores_V = row_of_scores(49152, spread, step=step)
    for top_k, top_p in [(None, 0.95), (None, 0.3), (50, 1.0), (50, 0.95), (20000, 0.9)]:
        found = leading_prefix(scores_V, top_k=top_k, top_p=top_p)
        assert found == prefix_by_sort(scores_V, top_k=top_k, top_p=top_p)


def test_a_mass_within_rounding_of_top_p_goes_by_the_definition():
    """Each of these masses is the very running sum at some token, or the float beside it."""
    # Masses of very different sizes: no sum of them is exact in float64.
    scores_V = row_of_scores(6000, 6.0)
    running_C = np.cumsum(np.exp(-np.sort(-scores_V)), dtype=np.float64)
    for index in range(60):
        exact = running_C[index] / running_C[-1]
        for top_p in (exact, np.nextafter(exact, 0.0), np.nextafter(exact, 1.0)):
            found = leading_prefix(scores_V, top_k=None, top_p=float(top_p))
            assert found == prefix_by_sort(scores_V, top_k=None, top_p=float(top_p))
            assert abs(found[0] - (index + 1)) <= 1


def test_equal_scores_that_meet_top_p_exactly():
    scores_V = np.zeros(8192, dtype=np.float32)
    assert leading_prefix(scores_V, top_k=None, top_p=0.5) == (4096, 0.0)
    assert leading_prefix(scores_V, top_k=6000, top_p=0.5) == (3000, 0.0)
    assert leading_prefix(scores_V, top_k=17, top_p=1.0) == (17, 0.0)


def test_a_language_models_row_is_not_sorted(monkeypatch: pytest.MonkeyPatch):
    scores_V = row_of_scores(49152, 2.5)
    expected = prefix_by_sort(scores_V, top_k=None, top_p=0.5)
    lengths: list[int] = []
    sort = np.sort
    monkeypatch.setattr(np, "sort", lambda row: lengths.append(len(row)) or sort(row))
    assert leading_prefix(scores_V, top_k=None, top_p=0.5) == expected
    leading_prefix(scores_V, top_k=50, top_p=1.0)
    leading_prefix(scores_V, top_k=50, top_p=0.9)
    assert lengths
    assert max(lengths) <= 4096


def test_running_sums_go_token_by_token():
    scores_V = row_of_scores(9000, 6.0)
    masses_V = np.exp(-np.sort(-scores_V)).astype(np.float64)
    total = 0.0
    for mass in masses_V.tolist():
        total += mass
    top_p = float(np.cumsum(masses_V)[700] / total)
    assert total == np.cumsum(masses_V)[-1]
    count, _ = prefix_by_sort(scores_V, top_k=None, top_p=top_p)
    assert count == int(np.searchsorted(np.cumsum(masses_V), top_p * total)) + 1


def test_the_mass_of_a_score_does_not_depend_on_its_place():
    """What lets sums over parts of a row stand for sums over the sorted row."""
    scores_V = row_of_scores(3000, 4.0)
    masses_V = np.exp(scores_V)
    for start in range(40):
        assert np.array_equal(np.exp(scores_V[start : start + 37]), masses_V[start : start + 37])
    assert np.array_equal(np.exp(scores_V[::-1]), masses_V[::-1])
