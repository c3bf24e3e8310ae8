"""Flattening: the layout of a step against one written by hand."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import AttentionLayout
from dspark.engine.batch import Run, layout_by_arrays, layout_of
from dspark.engine.kv_cache import KVCache
from dspark.kernels import extension

CPU = torch.device("cpu")


def filled_cache() -> tuple[KVCache, int, int]:
    cache = KVCache(num_pages=16, page_size=4, max_requests=3, max_positions=24)
    first, second = cache.open(), cache.open()
    cache.reserve(first, 12)
    cache.reserve(second, 8)
    return cache, first, second


def test_a_mixed_step_has_the_layout_of_its_runs() -> None:
    cache, first, second = filled_cache()
    runs = [Run(slot=second, start=5, num_tokens=1), Run(slot=first, start=6, num_tokens=4)]
    layout = layout_of(runs, cache, device=CPU)
    assert layout.query_starts_R1.tolist() == [0, 1, 5]
    assert layout.positions_N.tolist() == [5, 6, 7, 8, 9]
    assert layout.visible_N.tolist() == [6, 7, 8, 9, 10]
    assert layout.max_visible == 10
    tables = layout.block_tables_RP.tolist()
    expected = [tables[0][1] * 4 + 1, *(tables[1][p // 4] * 4 + p % 4 for p in (6, 7, 8, 9))]
    assert layout.slots_N.tolist() == expected


def test_a_block_sees_all_of_itself() -> None:
    cache, first, _ = filled_cache()
    layout = layout_of([Run(slot=first, start=6, num_tokens=3)], cache, device=CPU, is_two_way=True)
    assert layout.visible_N.tolist() == [9, 9, 9]


def test_a_single_request_is_described_by_two_rows_the_second_empty() -> None:
    cache, first, _ = filled_cache()
    layout = layout_of([Run(slot=first, start=0, num_tokens=1)], cache, device=CPU)
    assert layout.query_starts_R1.tolist() == [0, 1, 1]
    assert layout.block_tables_RP.shape == (2, 2)


@given(
    page_size=st.sampled_from([1, 3, 4]),
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4),
    max_positions=st.sampled_from([1, 15, 40]),
    is_two_way=st.booleans(),
)
def test_the_operator_lays_out_what_the_arrays_say(
    page_size: int, requests: list[tuple[int, int]], max_positions: int, is_two_way: bool
) -> None:
    """Tables as narrow as one page and as wide as they can be; positions reserved but not used."""
    cache = KVCache(num_pages=200, page_size=page_size, max_requests=4, max_positions=max_positions)
    runs = []
    for start, count in requests:
        start = min(start, max_positions - 1)
        runs.append(Run(cache.open(), start, min(count, max_positions - start)))
        cache.reserve(runs[-1].slot, max_positions)
    runs.reverse()
    found = layout_of(runs, cache, device=CPU, is_two_way=is_two_way)
    expected = layout_by_arrays(runs, cache, device=CPU, is_two_way=is_two_way)
    for field in fields(AttentionLayout):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one, other), field.name
        else:
            assert one == other


@pytest.mark.skipif(not extension.IS_LOADED, reason="the C++ operators are not built")
@pytest.mark.parametrize(
    "run", [Run(0, 20, 5), Run(3, 0, 1), Run(-1, 0, 1), Run(0, -1, 2), Run(0, 3, -1)]
)
def test_positions_without_a_page_of_the_table_are_refused(run: Run) -> None:
    with pytest.raises(RuntimeError, match="are not in a table"):
        layout_of([run], filled_cache()[0], device=CPU)
