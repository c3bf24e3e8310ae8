"""What is learnt of copies, against texts whose repetitions are known."""

import math
import random

import pytest

from dspark.algorithms.copy_odds import CopyOdds, num_right


def test_before_anything_is_seen_a_longer_match_is_trusted_more() -> None:
    """The rule of succession: an event seen m + k times and never missed."""
    odds = CopyOdds(3)
    assert [math.exp(logit) for logit in odds.logits(3)] == pytest.approx([4.0, 5.0, 6.0])
    promised = [odds.expected(length) for length in (3, 4, 6, 9, 16)]
    assert promised == sorted(promised)
    assert pytest.approx(odds.expected(3)) == 4 / 5 + 4 / 6 + 4 / 7


def test_chances_become_those_of_the_texts_by_length_and_position() -> None:
    """A token behind a wrong one tells nothing: chances are conditional."""
    rng, odds = random.Random(0), CopyOdds(4)
    truth = {3: (0.5, 0.9, 0.2, 0.7), 12: (0.95, 0.97, 0.97, 0.97)}
    for _ in range(4000):
        for length, chances in truth.items():
            right = 0
            while right < 4 and rng.random() < chances[right]:
                right += 1
            odds.saw(length, right)
    for length, chances in truth.items():
        found = [1 / (1 + math.exp(-logit)) for logit in odds.logits(length)]
        assert found == pytest.approx(chances, abs=0.06)
        products = [math.prod(chances[: k + 1]) for k in range(4)]
        assert odds.expected(length) == pytest.approx(sum(products), abs=0.12)


def test_what_is_long_ago_is_forgotten() -> None:
    odds = CopyOdds(1)
    for _ in range(3000):
        odds.saw(3, 1)
    for _ in range(1000):
        odds.saw(3, 0)
    assert odds.expected(3) < 0.3


def test_leading_tokens_that_are_the_same_are_counted() -> None:
    assert num_right([1, 2, 3], [1, 2, 4]) == 2
    assert num_right([1, 2, 3], [1, 2]) == 2
    assert num_right([1], [2]) == 0
    assert num_right([1, 2], [1, 2, 9]) == 2
