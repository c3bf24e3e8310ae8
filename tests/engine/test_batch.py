"""Flattening: the layout of a step against one written by hand."""

import torch

from dspark.engine.batch import Run, layout_of
from dspark.engine.kv_cache import KVCache

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
