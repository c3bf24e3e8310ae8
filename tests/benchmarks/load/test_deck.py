from itertools import islice, pairwise

import pytest

from dspark.benchmarks.load.deck import Deck, Task
from dspark.core import Coupling
from dspark.errors import InputError


def deck(*, temperature: float = 0.0, seed: int = 0, num_tasks: int = 6) -> Deck:
    tasks = [
        Task(
            domain=("math", "chat")[i % 2],
            prompt_ids=[i] * 4,
            answer_ids=[100 + i] * 10,
        )
        for i in range(num_tasks)
    ]
    return Deck(
        tasks=tasks,
        temperature=temperature,
        max_new_tokens=8,
        coupling=Coupling.MAXIMAL,
        seed=seed,
    )


def test_domains_take_turns_and_each_is_dealt_whole_before_it_repeats() -> None:
    dealt = list(islice(deck().deal(), 12))
    assert [ask.domain for ask in dealt] == ["math", "chat"] * 6
    for half in (dealt[:6], dealt[6:]):
        assert sorted(ask.prompt_ids[0] for ask in half) == [0, 1, 2, 3, 4, 5]


def test_the_order_is_a_function_of_the_seed_alone() -> None:
    first = [ask.prompt_ids for ask in islice(deck().deal(), 12)]
    assert first == [ask.prompt_ids for ask in islice(deck().deal(), 12)]
    assert first != [ask.prompt_ids for ask in islice(deck(seed=1).deal(), 12)]


def test_first_users_stand_at_evenly_spread_places_of_their_answers() -> None:
    dealt = list(islice(deck().deal_aged(4), 8))
    ages = [len(ask.prompt_ids) - 4 for ask in dealt]
    gaps = [b - a for a, b in pairwise(sorted(ages[:4]))]
    assert set(gaps) <= {1, 2}  # 7 places for 4 users
    assert ages[4:] == [0] * 4
    for ask, age in zip(dealt, ages, strict=True):
        assert ask.params.max_tokens == 8 - age
        assert list(ask.prompt_ids[4:]) == [100 + ask.prompt_ids[0]] * age


def test_sampled_answers_have_seeds_of_their_own_and_the_wanted_coupling() -> None:
    dealt = list(islice(deck(temperature=1.0).deal(), 12))
    assert len({ask.params.seed for ask in dealt}) == 12
    assert {ask.params.coupling for ask in dealt} == {Coupling.MAXIMAL}
    assert {ask.params.seed for ask in islice(deck().deal(), 3)} == {None}


def test_no_prompt_is_refused() -> None:
    with pytest.raises(InputError, match="at least one prompt"):
        deck(num_tasks=0)
