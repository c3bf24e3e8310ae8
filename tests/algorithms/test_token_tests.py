"""Tests of the tests: false alarms at the stated rate, power where something is wrong."""

import random
from collections import Counter

import pytest

from dspark.algorithms.token_tests import (
    Context,
    SamplePair,
    chi_square_tail,
    goodness_of_fit,
    holm,
    place,
    two_sample,
    uniformity,
)

LETTERS = "abcde"
PROBS = {"a": 0.5, "b": 0.25, "c": 0.15, "d": 0.07, "e": 0.03}


def chain(chance: random.Random, length: int, *, stay: float = 0.3) -> list[str]:
    """Letters that repeat the one before with probability `stay`."""
    answer: list[str] = []
    for _ in range(length):
        is_same = answer and chance.random() < stay
        answer.append(answer[-1] if is_same else chance.choices(LETTERS, list(PROBS.values()))[0])
    return answer


def pair(seed: int, *, stay: float = 0.3, count: int = 120) -> SamplePair:
    chance = random.Random(seed)
    return SamplePair(
        left=[chain(chance, 4, stay=stay) for _ in range(count)],
        right=[chain(chance, 4) for _ in range(count)],
    )


def share_below(p_values: list[float], level: float) -> float:
    return sum(p <= level for p in p_values) / len(p_values)


def test_equal_sources_alarm_at_the_stated_rate() -> None:
    """200 audits: 5% alarms would be 10 +- 3; more than 20 has a chance of 0.1%."""
    p_values = [
        two_sample([pair(i, count=40)], num_tokens=3, seed=i, permutations=199).p_value
        for i in range(200)
    ]
    assert share_below(p_values, 0.05) <= 0.10
    assert 0.35 <= share_below(p_values, 0.5) <= 0.65


def test_answers_that_differ_only_in_how_tokens_follow_each_other_are_told_apart() -> None:
    """Each position alone has the same distribution on both sides."""
    found = two_sample([pair(1, stay=0.6, count=200)], num_tokens=4, seed=0, permutations=999)
    assert found.p_value <= 0.002
    assert found.num_cells > 10


def test_prompts_are_not_mixed_with_each_other() -> None:
    """Two prompts with different answers, both the same on either side: no alarm."""
    chance = random.Random(0)

    def answers(letters: str) -> list[list[str]]:
        return [[chance.choice(letters), chance.choice(letters)] for _ in range(50)]

    pairs = [SamplePair(left=answers(ls), right=answers(ls)) for ls in ("ab", "cd")]
    assert two_sample(pairs, num_tokens=2, seed=0, permutations=999).p_value > 0.01


def test_sides_of_different_size_and_ended_answers_are_compared() -> None:
    left, right = [["a"]] * 30, [["a", "b"]] * 60
    found = two_sample([SamplePair(left=left, right=right)], num_tokens=2, seed=0, permutations=99)
    assert found.p_value == 0.01
    same = SamplePair(left=[["a"]] * 30, right=[["a"]] * 5)
    assert two_sample([same], num_tokens=2, seed=0, permutations=9).p_value == 1.0


def drawn(seed: int, count: int, probs: dict[str, float]) -> Counter[str]:
    return Counter(random.Random(seed).choices(LETTERS, list(probs.values()), k=count))


def test_stated_chances_alarm_at_the_stated_rate() -> None:
    p_values = [
        goodness_of_fit(
            [
                Context(counts=drawn(7 * i + n, n, PROBS), probs=PROBS, is_complete=True)
                for n in (20, 45, 150, 400)
            ]
        ).p_value
        for i in range(1000)
    ]
    assert share_below(p_values, 0.01) <= 0.02  # 10 +- 3 of 1000 at 1%
    assert 0.035 <= share_below(p_values, 0.05) <= 0.07
    assert 0.45 <= share_below(p_values, 0.5) <= 0.55


def test_wrong_chances_are_found_and_the_unlisted_rest_counts() -> None:
    wrong = {"a": 0.4, "b": 0.35, "c": 0.15, "d": 0.07, "e": 0.03}
    seen = drawn(1, 600, wrong)
    assert goodness_of_fit([Context(counts=seen, probs=PROBS, is_complete=True)]).p_value < 1e-4
    listed = {"a": 0.4}
    assert goodness_of_fit([Context(counts=seen, probs=listed, is_complete=False)]).p_value > 0.01
    listed = {"a": 0.7}
    assert goodness_of_fit([Context(counts=seen, probs=listed, is_complete=False)]).p_value < 1e-4


def test_one_impossible_token_is_enough() -> None:
    counts = {"a": 50, "b": 49, "z": 1}
    probs = {"a": 0.5, "b": 0.5}
    context = Context(counts=counts, probs=probs, is_complete=True)
    assert context.num_impossible == 1
    assert goodness_of_fit([context]).p_value == 0.0
    assert Context(counts=counts, probs=probs, is_complete=False).num_impossible == 0


def test_without_anything_to_compare_nothing_is_claimed() -> None:
    few = Context(counts={"a": 3}, probs={"a": 0.9, "b": 0.1}, is_complete=True)
    found = goodness_of_fit([few])
    assert (found.p_value, found.num_cells) == (1.0, 0)


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (29.588298, 10, 0.001), (0.0, 4, 1.0)],
)
def test_the_tail_is_that_of_the_tables(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-5)


def test_holm_is_stepwise() -> None:
    assert holm([0.02, 0.001, 0.04], rate=0.05) == [True, True, True]
    assert holm([0.03, 0.001, 0.04], rate=0.05) == [False, True, False]
    assert holm([0.02, 0.02, 0.02], rate=0.05) == [False, False, False]
    assert holm([], rate=0.05) == []


def places(seed: int, count: int, probs: dict[str, float]) -> list[float]:
    """Letters drawn from `probs`, placed in PROBS, of which the rarest is not listed."""
    chance = random.Random(seed)
    listed = {letter: PROBS[letter] for letter in "abcd"}
    tokens = chance.choices(LETTERS, list(probs.values()), k=count)
    return [place(token, listed, chance.random()) for token in tokens]


def test_places_of_tokens_drawn_as_stated_are_even_at_the_stated_rate() -> None:
    p_values = [uniformity(places(i, 300, PROBS)).p_value for i in range(500)]
    assert share_below(p_values, 0.05) <= 0.09  # 25 +- 5 of 500
    assert 0.42 <= share_below(p_values, 0.5) <= 0.58
    assert place("a", PROBS, 0.5) == pytest.approx(0.25)
    assert place("z", PROBS, 0.5) == 1.0


def test_places_of_other_tokens_are_not() -> None:
    other = {"a": 0.4, "b": 0.35, "c": 0.15, "d": 0.07, "e": 0.03}
    assert uniformity(places(1, 900, other)).p_value < 1e-3
    assert uniformity([0.5] * 10).p_value == 1.0
