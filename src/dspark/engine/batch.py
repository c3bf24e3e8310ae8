"""Flattening: runs of tokens of several requests become one ragged step, nothing padded.

It knows slots and positions, no model and no sampling.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dspark.core import AttentionLayout
from dspark.engine.kv_cache import KVCache
from dspark.kernels import extension

_LEAST = 2
"""Rows and pages that a layout describes at least."""


class Run(NamedTuple):
    """`num_tokens` consecutive positions of one slot, from `start` on."""

    slot: int
    start: int
    num_tokens: int


def layout_of(
    runs: Sequence[Run], cache: KVCache, *, device: torch.device, is_two_way: bool = False
) -> AttentionLayout:
    """The layout of a step made of these runs, one row of the block tables for each.

    Causal by default; `is_two_way`: all tokens of a run see the whole run (the drafter's block).
    At least two rows and two pages are described, the spare ones empty, so that a compiled
    graph sees no dimension of size one but the tokens.
    """
    if not (extension.IS_LOADED and device.type == "cpu"):
        return layout_by_arrays(runs, cache, device=device, is_two_way=is_two_way)
    block_tables_RP, query_starts_R1, visible_N, positions_N, slots_N = (
        torch.ops.dspark.lay_out.default(
            cache.table,
            [number for run in runs for number in run],
            cache.page_size,
            is_two_way,
            _LEAST,
        )
    )
    return AttentionLayout(
        block_tables_RP=block_tables_RP,
        query_starts_R1=query_starts_R1,
        visible_N=visible_N,
        positions_N=positions_N,
        slots_N=slots_N,
        max_visible=max(run.start + run.num_tokens for run in runs),
    )


def layout_by_arrays(
    runs: Sequence[Run], cache: KVCache, *, device: torch.device, is_two_way: bool = False
) -> AttentionLayout:
    """`layout_of` without the operator: its reference, and what other devices use."""
    table_R3 = np.array(runs, dtype=np.int64)
    slots, starts, counts = table_R3.T
    num_runs = len(runs)
    ends = starts + counts
    first = np.zeros(num_runs + 1, dtype=np.int64)
    np.cumsum(counts, out=first[1:])
    total, max_visible = int(first[-1]), int(ends.max())
    positions_N = np.arange(total) + np.repeat(starts - first[:-1], counts)
    visible_N = np.repeat(ends, counts) if is_two_way else positions_N + 1
    num_rows = max(_LEAST, num_runs)
    tables_RP = np.zeros((num_rows, max(_LEAST, cache.pages_for(max_visible))), dtype=np.int32)
    tables = cache.tables(slots, num_positions=max_visible)
    tables_RP[:num_runs, : tables.shape[1]] = tables
    query_starts_R1 = np.full(num_rows + 1, total, dtype=np.int32)
    query_starts_R1[: num_runs + 1] = first
    places_N = cache.places(np.repeat(slots, counts), positions_N)
    return AttentionLayout(
        block_tables_RP=torch.from_numpy(tables_RP).to(device),
        query_starts_R1=torch.from_numpy(query_starts_R1).to(device),
        visible_N=torch.from_numpy(visible_N.astype(np.int32)).to(device),
        positions_N=torch.from_numpy(positions_N).to(device),
        slots_N=torch.from_numpy(places_N).to(device),
        max_visible=max_visible,
    )
