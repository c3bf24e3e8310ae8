"""Prompts share a step: all get on, the oldest end first, nothing is left over."""

from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.prompt_shares import prompt_shares


def test_one_prompt_gets_all_that_it_needs() -> None:
    assert prompt_shares([300], 128) == [128]
    assert prompt_shares([30], 128) == [30]
    assert prompt_shares([], 128) == []


def test_a_short_prompt_behind_a_long_one_gets_on_and_the_oldest_gets_the_rest() -> None:
    assert prompt_shares([9000, 20], 128) == [108, 20]
    assert prompt_shares([9000, 9000], 128) == [96, 32]
    assert prompt_shares([10, 9000, 9000], 120) == [10, 90, 20]


@given(missing=st.lists(st.integers(1, 400), max_size=9), budget=st.integers(1, 300))
def test_a_budget_is_used_up_and_everybody_gets_a_part_of_half_of_it(
    missing: list[int], budget: int
) -> None:
    shares = prompt_shares(missing, budget)
    assert sum(shares) == min(sum(missing), budget)
    for share, count in zip(shares, missing, strict=True):
        assert min(count, budget // 2 // len(missing)) <= share <= count
