"""Probes of whom little has to be made up for; looks at plain steps, rarer as time goes on."""

import pytest

from dspark.engine.probes import LOOK, LOSS, PlainLooks, Probes, candidates


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


@pytest.mark.parametrize("loss", [0.5, 4.0, 30.0])
def test_probes_are_paid_before_they_are_made(loss: float) -> None:
    """At no moment have they lost more than their share; and they spend it."""
    probes, committed, lost = Probes(), 0, 0.0
    for _ in range(5000):
        if probes.affords(loss):
            probes.lost(loss)
            lost += loss
            assert lost <= LOSS * committed * (1.0 + 1e-9)
        probes.earn(16)
        committed += 16
    assert lost > 0.8 * LOSS * committed


def test_what_a_probe_lost_beyond_what_was_expected_is_earned_first() -> None:
    probes = Probes()
    probes.earn(round(1.0 / LOSS))
    assert probes.affords(0.9)
    probes.lost(3.0)
    probes.earn(round(2.0 / LOSS))
    assert not probes.affords(0.9)
    probes.earn(round(1.0 / LOSS))
    assert probes.affords(0.9)


def test_a_dear_probe_is_saved_up_for_a_lucky_one_earns_nothing() -> None:
    probes = Probes()
    probes.lost(-5.0)
    assert not probes.affords(20.0)
    for _ in range(21):
        probes.earn(round(1.0 / LOSS))
    assert probes.affords(20.0)
