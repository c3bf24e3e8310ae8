"""The index of repeated runs against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.algorithms.ngram_index import Continuation, NgramIndex
from dspark.errors import InputError


def searched(ids: list[int], num_tokens: int, shortest: int, longest: int) -> Continuation | None:
    """The slow reference: every earlier place, longest match first, latest place first."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if length < len(ids) and ids[place - length : place] == ids[-length:]:
                text = list(ids)
                while len(text) < len(ids) + num_tokens:
                    text.append(text[place + len(text) - len(ids)])
                return Continuation(token_ids=text[len(ids) :], match_length=length)
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(1, 7), max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_any_text_grown_in_any_pieces_continues_as_the_search_says(
    ids: list[int], pieces: list[int], shortest: int, more: int
) -> None:
    index = NgramIndex(min_length=shortest, max_length=shortest + more)
    for size in [*pieces, len(ids)]:
        index.extend(ids[len(index) : len(index) + size])
        seen = ids[: len(index)]
        assert index.continuation(5) == searched(seen, 5, shortest, shortest + more)
    assert len(index) == len(ids)


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    index = NgramIndex(min_length=1, max_length=3)
    index.extend([1, 2, 3, 9, 5, 3, 7, 1, 2, 3])
    assert index.continuation(2) == Continuation(token_ids=[9, 5], match_length=3)


def test_a_loop_is_continued_beyond_the_texts_end() -> None:
    index = NgramIndex(min_length=2, max_length=4)
    index.extend([8, 1, 2, 1, 2])
    assert index.continuation(5) == Continuation(token_ids=[1, 2, 1, 2, 1], match_length=2)


def test_new_words_and_short_texts_have_no_continuation() -> None:
    index = NgramIndex(min_length=2, max_length=3)
    for token in (1, 2, 3, 4, 2):
        index.extend([token])
        assert index.continuation(4) is None


@pytest.mark.parametrize(("shortest", "longest"), [(0, 2), (3, 2)])
def test_lengths_that_mean_nothing_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(InputError, match="must be at least 1 and rise"):
        NgramIndex(min_length=shortest, max_length=longest)


def test_a_match_is_counted_beyond_the_length_by_which_it_is_looked_for() -> None:
    ids = [9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5]
    for longest, counted in ((0, 2), (4, 4), (16, 5)):
        index = NgramIndex(min_length=2, max_length=2, longest=longest)
        index.extend(ids)
        found = index.continuation(2)
        assert found is not None
        assert (list(found.token_ids), found.match_length) == ([6, 8], counted)


def test_a_match_that_reaches_the_beginning_ends_there() -> None:
    index = NgramIndex(min_length=2, max_length=2, longest=16)
    index.extend([1, 2, 3, 1, 2, 3])
    found = index.continuation(1)
    assert found is not None
    assert found.match_length == 3
