"""Two speeds tell what entries nobody visited take, where one factor is far off."""

import numpy as np
import pytest

from dspark.algorithms.two_speeds import SpeedTracker, products_shares, tilts

# Passes of 4 requests on one machine in its two states, ms by tokens (log of 2026-11-30).
TOKENS = (4, 8, 12, 16, 20, 24)
STATES = {
    "memory slow": np.array([10.0, 10.06, 10.28, 12.64, 16.08, 18.59]),
    "memory fast": np.array([7.39, 8.45, 11.45, 14.4, 17.7, 20.9]),
}


def foretold(before: str, after: str, visited: list[int], *, count: int = 48) -> np.ndarray:
    """Seconds of the second state by the table of the first, after visits to some entries."""
    table, truth, tracker = STATES[before], STATES[after], SpeedTracker()
    shares_E, rng = products_shares(TOKENS, table), np.random.default_rng(0)
    for number in range(count):
        e = visited[number % len(visited)]
        ratio = np.log(truth[e] / table[e]) + rng.normal(0.0, 0.05)
        if number % 20 == 19:
            ratio += 2.0  # another process
        tracker.add(ratio, float(shares_E[e]))
    speed, tilt = tracker.speeds
    return table * np.exp(speed + tilts(shares_E, tilt))


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("visited", [[0, 2], [0, 5], [1, 3]])
def test_two_entries_tell_the_other_state(before: str, visited: list[int]) -> None:
    after = next(name for name in STATES if name != before)
    table, truth = STATES[before], STATES[after]
    error = np.abs(np.log(foretold(before, after, visited) / truth)).max()
    one_factor = table * np.exp(np.log(truth / table)[visited].mean())
    assert error < 0.13
    assert error < 0.75 * np.abs(np.log(one_factor / truth)).max()


def test_entries_of_one_kind_move_all_alike() -> None:
    """Nothing tells the two speeds apart, so what was not visited changes as much."""
    found = foretold("memory slow", "memory fast", [0])
    np.testing.assert_allclose(found / STATES["memory slow"], 0.739, rtol=0.08)


def test_a_state_that_changes_is_followed() -> None:
    table, tracker = STATES["memory slow"], SpeedTracker()
    shares_E = products_shares(TOKENS, table)
    for name in ("memory fast", "memory slow", "memory fast"):
        for e in 24 * [0, 3]:
            tracker.add(float(np.log(STATES[name][e] / table[e])), float(shares_E[e]))
        speed, tilt = tracker.speeds
        found = table * np.exp(speed + tilts(shares_E, tilt))
        assert np.abs(np.log(found / STATES[name])).max() < 0.1


def test_shares_rise_from_passes_that_wait_for_memory_to_products() -> None:
    shares_E = products_shares(TOKENS, STATES["memory slow"])
    assert shares_E[0] < 0.01
    assert shares_E[-1] > 0.99
    assert (np.diff(shares_E) > 0).all()


def test_a_curve_without_products_has_none() -> None:
    """A flat table, of another device say, has one speed."""
    shares_E = products_shares((1, 8, 64), (5.0, 5.1, 5.2))
    assert (shares_E == 0.0).all()
    assert (tilts(shares_E, 1.0) == 0.0).all()


def test_seconds_in_proportion_to_tokens_are_products() -> None:
    shares_E = products_shares((1, 2, 4), (1.0, 2.0, 4.0))
    assert (shares_E[1:] > 0.99).all()
