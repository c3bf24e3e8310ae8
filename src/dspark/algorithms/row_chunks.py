"""Rows taken together: a few at a time where that is faster, or neighbours that are alike.
It knows no values of theirs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from torch import Tensor

Row = TypeVar("Row")


def row_runs(
    rows: Sequence[Row], key: Callable[[Row], Hashable]
) -> Iterator[tuple[slice, list[Row]]]:
    """Neighbouring rows of equal key, and where they stand."""
    start = 0
    for _, group in groupby(rows, key=key):
        members = list(group)
        yield slice(start, start + len(members)), members
        start += len(members)


def row_chunks(values_NV: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of a tensor in order.

    On a CPU a slice holds about 2^16 elements, so that the temporaries of a chain of elementwise
    operations stay in the cache and come from recycled memory: fresh pages cost more than the
    arithmetic. Elsewhere it is a single slice.
    """
    num_rows, width = values_NV.shape
    step = max(1, 2**16 // max(width, 1)) if values_NV.device.type == "cpu" else num_rows
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
