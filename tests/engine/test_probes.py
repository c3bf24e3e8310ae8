"""Probes of whom little has to be made up for; looks at plain steps, rarer as time goes on."""

import pytest

from dspark.engine.probes import LOOK, PlainLooks, candidates


def drafting_steps(
    looks: PlainLooks, num_requests: int, *, lift: float, num_looks: int
) -> list[int]:
    """Steps that drafted before each of the next looks."""
    found, steps = [], 0
    while len(found) < num_looks and steps < 2000:
        if looks.is_due(num_requests, lift=lift, num_steps=8):
            found.append(steps)
            steps = 0
        else:
            steps += 8
    return found


def test_looks_become_rarer() -> None:
    assert drafting_steps(PlainLooks(), 8, lift=1.05, num_looks=4) == [16, 64, 256, 256]


def test_looks_cost_a_share_of_what_drafting_brings() -> None:
    """A clear gain may be that of a table of another day, so it is looked at too, but seldom."""
    for lift in (1.5, 3.0):
        first, *later = drafting_steps(PlainLooks(), 8, lift=lift, num_looks=4)
        assert first == 16
        for steps in later:
            assert LOOK * (1.0 - 1.0 / lift) / steps == pytest.approx(0.004, rel=0.1)


def test_numbers_of_requests_near_each_other_share_their_looks() -> None:
    looks = PlainLooks()
    assert drafting_steps(looks, 8, lift=1.0, num_looks=1) == [16]
    assert drafting_steps(looks, 11, lift=1.0, num_looks=1) == [64]
    assert drafting_steps(looks, 2, lift=1.0, num_looks=1) == [16]


def test_new_requests_are_probed_youngest_first_then_those_that_rested_longest() -> None:
    drafted_at, rounds = [None, 40, None, 20, 95, None], [30, 60, 2, 60, 100, 9]
    assert candidates(drafted_at, rounds) == [2, 5, 0, 3, 1]
