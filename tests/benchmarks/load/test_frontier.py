import math

import pytest

from dspark.benchmarks.load.frontier import Frontier, Point, gains


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(tokens_per_s=rate, per_user_tokens_per_s=speed) for rate, speed in pairs]


def test_a_point_that_another_beats_in_both_is_left_out() -> None:
    kept = Frontier.of(points((10, 10), (40, 5), (30, 4), (60, 2))).points
    assert [(p.tokens_per_s, p.per_user_tokens_per_s) for p in kept] == [(10, 10), (40, 5), (60, 2)]


def test_between_two_loads_the_frontier_is_a_line_in_logarithms() -> None:
    frontier = Frontier.of(points((10, 100), (40, 25)))
    assert frontier.per_user_at(20) == pytest.approx(50)
    assert frontier.tokens_per_s_at(50) == pytest.approx(20)
    assert frontier.per_user_at(5) == 100  # a server that idles is no slower
    assert frontier.per_user_at(41) is None
    assert frontier.tokens_per_s_at(10) == 40
    assert frontier.tokens_per_s_at(101) is None


def test_a_policy_that_is_twice_as_fast_everywhere_gains_what_the_hand_computes() -> None:
    theirs = points((10, 10), (20, 5))
    ours = points((20, 20), (40, 10))
    found = gains(ours, theirs)
    # at 10 tokens/s ours serve as fast as with one user, 20; at 20 the same
    assert found.per_user_gain_at_matched_throughput == [pytest.approx(1.0), pytest.approx(3.0)]
    # only speed 10 is reached by both: ours at 40, theirs at 10
    assert found.middle_speed == pytest.approx(10.0)
    assert found.throughput_gain_at_middle_speed == pytest.approx(3.0)


def test_the_middle_speed_is_that_of_the_speeds_which_both_reach() -> None:
    found = gains(points((10, 16), (40, 2)), points((8, 8), (30, 1)))
    assert found.middle_speed == pytest.approx(math.sqrt(2 * 8))


def test_a_policy_that_cannot_serve_that_much_has_no_gain_there() -> None:
    found = gains(points((10, 10)), points((8, 8), (12, 6)))
    assert found.per_user_gain_at_matched_throughput == [pytest.approx(0.25), None]
    assert gains(points((10, 10)), points((8, 8))).throughput_gain_at_middle_speed is None
