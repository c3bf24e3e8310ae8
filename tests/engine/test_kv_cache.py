"""Page bookkeeping: its invariants hold after any sequence of operations."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark.engine.kv_cache import KVCache
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


def test_roll_back_gives_whole_pages_back() -> None:
    cache = make_cache()
    slot = cache.open()
    cache.reserve(slot, 24)
    cache.write(slot, 24)
    cache.commit(slot, 24)
    free = cache.num_free_pages
    cache.roll_back(slot, 5)
    assert cache.num_free_pages == free + 4
    assert cache.committed(slot) == 5
    cache.check()


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


class CacheMachine(RuleBasedStateMachine):
    """Random operations; a plain dict of (pages, committed, written) says what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.committed: dict[int, int] = {}
        self.capacity: dict[int, int] = {}

    @precondition(lambda self: self.cache.has_free_slot)
    @rule()
    def open(self) -> None:
        slot = self.cache.open()
        assert slot not in self.committed
        self.committed[slot], self.capacity[slot] = 0, 0

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), num_positions=st.integers(1, 24))
    def reserve(self, data: st.DataObject, num_positions: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        missing = self.cache.pages_for(num_positions) - self.cache.pages_for(self.capacity[slot])
        if missing > self.cache.num_free_pages:
            with pytest.raises(CapacityError):
                self.cache.reserve(slot, num_positions)
            return
        self.cache.reserve(slot, num_positions)
        self.capacity[slot] = max(self.capacity[slot], num_positions)

    @precondition(lambda self: any(self.capacity.values()))
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(s for s, n in self.capacity.items() if n)))
        written = data.draw(st.integers(self.committed[slot], self.capacity[slot]))
        self.cache.write(slot, written)
        kept = data.draw(st.integers(self.committed[slot], written))
        self.cache.commit(slot, kept)
        self.committed[slot] = kept

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        keep = data.draw(st.integers(0, self.capacity[slot]))
        self.cache.roll_back(slot, keep)
        self.committed[slot] = min(self.committed[slot], keep)
        self.capacity[slot] = min(self.capacity[slot], self.cache.pages_for(keep) * 4)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.committed)))
        self.cache.close(slot)
        del self.committed[slot], self.capacity[slot]

    @invariant()
    def holds(self) -> None:
        self.cache.check()
        for slot, committed in self.committed.items():
            assert self.cache.committed(slot) == committed
        held = sum(self.cache.pages_for(n) for n in self.capacity.values())
        assert self.cache.num_free_pages == self.cache.num_pages - 1 - held


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
