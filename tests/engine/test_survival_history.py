"""Rows by request, and those that stand in for what is not known yet."""

import numpy as np

from dspark.engine.survival_history import DEPTH, SurvivalHistory


def row(value: float) -> np.ndarray:
    return np.full((1, 3), value, dtype=np.float32)


def values(history: SurvivalHistory, slot: int) -> list[float]:
    return sorted(history.blocks([slot])[0, :, 0].tolist())


def test_a_request_has_its_own_rows_and_a_new_one_the_first_rows_of_others() -> None:
    history = SurvivalHistory(3)
    history.begin(0)
    assert min(values(history, 0)) > 0.5  # drafting is tried first
    for index in range(5 * DEPTH):
        history.add([0], row(0.01 if index < 4 else 0.4))
    assert values(history, 0) == [np.float32(0.4)] * DEPTH
    history.begin(2)
    found = values(history, 2)
    assert found.count(np.float32(0.01)) == 4
    assert np.float32(0.4) not in found


def test_half_of_the_rows_are_the_latest_and_the_others_older() -> None:
    history = SurvivalHistory(3)
    history.begin(0)
    for index in range(100):
        history.add([0], row(index / 1000))
    found = np.array(values(history, 0)) * 1000
    latest = np.arange(100 - DEPTH // 2, 100)
    older = np.arange(68, 100, 4)
    np.testing.assert_allclose(found, sorted([*latest, *older]), rtol=1e-5)


def test_rows_of_lists_and_of_arrays_are_kept_alike() -> None:
    one, many = SurvivalHistory(3), SurvivalHistory(3)
    rng = np.random.default_rng(0)
    for history in (one, many):
        for slot in range(3):
            history.begin(slot)
    for _ in range(DEPTH + 3):
        rows = rng.random((2, 3)).astype(np.float32)
        one.add([0, 2], rows.tolist())
        many.add([0, 2], rows)
    for history in (one, many):
        history.begin(1)
    np.testing.assert_array_equal(one.blocks([0, 1, 2]), many.blocks([0, 1, 2]))


def test_blocks_are_copies() -> None:
    history = SurvivalHistory(3)
    history.begin(0)
    before = history.blocks([0])
    before[:] = 0.0
    assert min(values(history, 0)) > 0.5
