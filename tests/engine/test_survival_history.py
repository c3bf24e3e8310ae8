"""Rows by request, and those that stand in for what is not known yet."""

import numpy as np

from dspark.engine.survival_history import DEPTH, SurvivalHistory


def row(value: float) -> np.ndarray:
    return np.full((1, 3), value, dtype=np.float32)


def test_a_request_has_its_own_rows_and_a_new_one_those_of_others() -> None:
    history = SurvivalHistory(3)
    history.begin(0)
    assert (history.scenarios([0])[:, 0, 0] > 0.5).all()  # drafting is tried first
    for index in range(DEPTH):
        history.add([0], row(0.01 * index))
    history.begin(2)
    assert sorted(history.scenarios([2])[:, 0, 0].tolist()) == sorted(
        history.scenarios([0])[:, 0, 0].tolist()
    )
    for _ in range(DEPTH):
        history.add([2], row(0.9))
    assert history.scenarios([2]).min() == np.float32(0.9)
    np.testing.assert_allclose(history.means([0, 2])[1], 0.9, rtol=1e-6)
    assert history.scenarios([0]).max() < 0.1


def test_many_requests_show_their_latest_rows() -> None:
    history = SurvivalHistory(3)
    slots = list(range(DEPTH))
    for slot in slots:
        history.begin(slot)
    rows = np.arange(3 * DEPTH, dtype=np.float32).reshape(DEPTH, 3)
    history.add(slots, rows / 100)
    history.add(slots, rows)
    found = history.scenarios(slots)
    assert found.shape == (1, DEPTH, 3)
    np.testing.assert_array_equal(found[0], rows)
    pair = history.scenarios([1, 5])
    assert pair.shape == (DEPTH // 2, 2, 3)
    np.testing.assert_array_equal(pair[0], rows[[1, 5]])
    np.testing.assert_allclose(pair[1], rows[[1, 5]] / 100)


def test_rows_of_few_requests_are_kept_as_those_of_many() -> None:
    one, many = SurvivalHistory(3), SurvivalHistory(3)
    rng = np.random.default_rng(0)
    for history in (one, many):
        history.begin(0)
        history.begin(1)
    for _ in range(DEPTH + 3):
        rows = rng.random((2, 3)).astype(np.float32)
        one.add_few([(0, rows[0].tolist()), (1, rows[1].tolist())])
        many.add([0, 1], rows)
    for history in (one, many):
        history.begin(2)
    np.testing.assert_array_equal(one.scenarios([0, 1]), many.scenarios([0, 1]))
    np.testing.assert_array_equal(one.means([2]), many.means([2]))
