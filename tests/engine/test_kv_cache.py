"""Page bookkeeping: its invariants hold after any sequence of operations."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.engine.kv_cache import KVCache
from dspark.engine.prefix_index import extend_names
from dspark.errors import CapacityError, InputError


def make_cache(**changes: int) -> KVCache:
    values = {"num_pages": 9, "page_size": 4, "max_requests": 3, "max_positions": 24}
    return KVCache(**{**values, **changes})


def test_page_zero_is_never_given_away() -> None:
    cache = make_cache()
    slot = cache.open()
    cache.reserve(slot, 24)
    slots = np.array([slot])
    assert 0 not in cache.tables(slots, num_positions=24)[0]


def test_places_follow_the_block_table() -> None:
    cache = make_cache()
    first, second = cache.open(), cache.open()
    cache.reserve(first, 6)
    cache.reserve(second, 4)
    cache.reserve(first, 12)
    table = cache.tables(np.array([first]), num_positions=12)[0]
    places = cache.places(np.full(12, first), np.arange(12))
    assert places.tolist() == [int(table[i // 4]) * 4 + i % 4 for i in range(12)]
    assert len({*table.tolist(), *cache.tables(np.array([second]), num_positions=4)[0]}) == 4
    cache.check()


def test_commit_rolls_back_what_was_rejected() -> None:
    """Length of the cache equals the committed length after a reject (UC-052)."""
    cache = make_cache()
    slot = cache.open()
    cache.reserve(slot, 12)
    cache.write(slot, 9)
    cache.commit(slot, 6)
    assert cache.committed(slot) == 6
    with pytest.raises(AssertionError):
        cache.commit(slot, 9)  # positions 6..8 were rolled back


def test_what_does_not_fit_is_one_clear_sentence() -> None:
    cache = make_cache(num_pages=4)
    slot = cache.open()
    with pytest.raises(CapacityError, match="4 more pages are needed and 3 are free"):
        cache.reserve(slot, 16)
    with pytest.raises(CapacityError, match="at most 24"):
        cache.reserve(slot, 25)
    cache.check()
    cache.open()
    cache.open()
    with pytest.raises(CapacityError, match="All 3 request slots"):
        cache.open()
    with pytest.raises(InputError, match="too small"):
        make_cache(num_pages=1)


def names_of(tokens: Sequence[int], *, num_ahead: int = 0) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, tokens, page_size=4, num_ahead=num_ahead)
    return names


def filled(cache: KVCache, tokens: Sequence[int]) -> int:
    """A request that has run all of its tokens but the last."""
    slot = cache.open(names_of(tokens))
    cache.reserve(slot, len(tokens))
    cache.write(slot, len(tokens) - 1)
    cache.commit(slot, len(tokens) - 1)
    cache.share(slot, names_of(tokens))
    return slot


def test_names_say_all_words_up_to_the_end_of_a_page() -> None:
    tokens = [7, 8, 9, 7, 7, 8, 9, 7, 5]
    first, second = names_of(tokens)
    assert first != second  # the same four tokens, behind other words
    assert names_of([*tokens[:8], 6]) == [first, second]
    assert names_of(tokens[:8]) == [first]  # the last token is always run
    assert names_of([1, *tokens[1:]])[1] != second
    grown = names_of(tokens[:6])
    extend_names(grown, tokens, page_size=4, num_ahead=0)
    assert grown == [first, second]


def test_names_look_ahead_where_a_page_depends_on_the_next_token() -> None:
    tokens = [7, 8, 9, 7, 7, 8, 9, 7, 5]
    same = names_of(tokens, num_ahead=1)
    other = names_of([*tokens[:8], 6], num_ahead=1)
    assert other[0] == same[0]
    assert other[1] != same[1]


def test_a_closed_request_leaves_its_words_to_the_next_one() -> None:
    cache = make_cache()
    cache.close(filled(cache, range(10)))
    assert (cache.num_free_pages, cache.num_cached_pages) == (8, 2)
    slot = cache.open(names_of([*range(8), 33, 34]))
    assert cache.committed(slot) == 8
    assert (cache.num_free_pages, cache.num_cached_pages) == (6, 0)
    cache.check()


def test_running_requests_share_pages_and_only_the_last_one_frees_them() -> None:
    cache = make_cache()
    first = filled(cache, range(10))
    second = cache.open(names_of(range(9)))
    assert cache.committed(second) == 8
    assert cache.table[first, :2].tolist() == cache.table[second, :2].tolist()
    cache.close(first)
    assert (cache.num_free_pages, cache.num_cached_pages) == (6, 0)
    cache.check()
    cache.close(second)
    assert (cache.num_free_pages, cache.num_cached_pages) == (8, 2)


def test_the_words_that_rested_longest_go_first_and_the_end_of_a_text_before_its_start() -> None:
    cache = make_cache(num_pages=7)
    cache.close(filled(cache, range(10)))
    cache.close(filled(cache, range(50, 60)))
    slot = cache.open(names_of(range(5)))  # the first words are wanted again
    cache.close(slot)
    cache.reserve(cache.open(), 20)  # five pages: two empty ones, three that rest
    assert cache.num_cached_pages == 1
    assert cache.committed(cache.open(names_of(range(10)))) == 4
    cache.check()


def test_a_request_takes_over_what_another_one_read_meanwhile() -> None:
    cache = make_cache()
    tokens = list(range(10))
    late = cache.open(names_of(tokens))
    cache.reserve(late, 12)
    assert cache.catch_up(late, names_of(tokens)) == 0
    early = filled(cache, tokens)
    free = cache.num_free_pages
    assert cache.catch_up(late, names_of(tokens)) == 8
    assert cache.num_free_pages == free + 2
    assert cache.table[early, :2].tolist() == cache.table[late, :2].tolist()
    assert len(set(cache.table[late].tolist()) - {0}) == 3
    cache.check()
    unaligned = cache.open()
    cache.reserve(unaligned, 8)
    cache.write(unaligned, 3)
    cache.commit(unaligned, 3)
    assert cache.catch_up(unaligned, names_of(tokens)) == 3
    cache.check()


def test_of_two_pages_with_equal_words_one_is_known() -> None:
    cache = make_cache()
    first, second = cache.open(), cache.open()
    for slot in (first, second):
        cache.reserve(slot, 8)
        cache.write(slot, 8)
        cache.commit(slot, 8)
        assert cache.can_share(slot)
        cache.share(slot, names_of(range(9)))
        assert not cache.can_share(slot)
    cache.close(second)
    assert cache.num_cached_pages == 0
    cache.close(first)
    assert cache.num_cached_pages == 2
    cache.check()


def test_what_rests_counts_as_free_once() -> None:
    """A hit on a page at rest saves nothing of what is free; a hit on a held page does."""
    cache = make_cache(num_pages=5)
    words = names_of(range(10))
    cache.close(filled(cache, range(10)))
    assert cache.can_open(16, words)
    assert not cache.can_open(16, words, spare=1)
    assert not cache.can_open(20, words)
    filled(cache, range(10))  # holds three of four
    assert cache.can_open(12, words)
    assert not cache.can_open(16, words)


class CacheMachine(RuleBasedStateMachine):
    """Random operations over few different texts; a plain record of each page's words says what
    must hold: what a request finds is what it would have written itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.tokens: dict[int, list[int]] = {}
        self.committed: dict[int, int] = {}
        self.rows: dict[int, tuple[int, ...]] = {}  # place -> all tokens up to its own

    def names(self, slot: int) -> list[bytes]:
        return names_of(self.tokens[slot])

    def place(self, slot: int, position: int) -> int:
        return int(self.cache.places(np.array([slot]), np.array([position]))[0])

    def write(self, slot: int, positions: Iterable[int]) -> None:
        for position in positions:
            words = tuple(self.tokens[slot][: position + 1])
            self.rows[self.place(slot, position)] = words

    @precondition(lambda self: self.cache.has_free_slot)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=23))
    def open(self, tokens: list[int]) -> None:
        names = names_of(tokens)
        can_open = self.cache.can_open(len(tokens), names)
        slot = self.cache.open(names)
        assert slot not in self.committed
        self.tokens[slot], self.committed[slot] = tokens, self.cache.committed(slot)
        assert self.committed[slot] < len(tokens)
        assert self.cache.can_reserve(slot, len(tokens)) == can_open
        if can_open:
            self.cache.reserve(slot, len(tokens))
        else:
            with pytest.raises(CapacityError):
                self.cache.reserve(slot, len(tokens))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        end = min(self.cache.capacity(slot), len(self.tokens[slot]))
        if end < self.committed[slot]:
            return
        written = data.draw(st.integers(self.committed[slot], end))
        self.write(slot, range(self.committed[slot], written))
        self.cache.write(slot, written)
        kept = data.draw(st.integers(self.committed[slot], written))
        self.cache.commit(slot, kept)
        self.committed[slot] = kept

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        self.cache.share(slot, self.names(slot))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        if self.cache.capacity(slot) >= len(self.tokens[slot]):
            found = self.cache.catch_up(slot, self.names(slot))
            assert self.committed[slot] <= found
            self.committed[slot] = found

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        self.cache.close(slot)
        del self.committed[slot], self.tokens[slot]

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        for slot, committed in self.committed.items():
            assert self.cache.committed(slot) == committed
            for position in range(committed):
                words = tuple(self.tokens[slot][: position + 1])
                assert self.rows[self.place(slot, position)] == words
        if not self.committed:
            assert self.cache.num_free_pages == self.cache.num_pages - 1


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
