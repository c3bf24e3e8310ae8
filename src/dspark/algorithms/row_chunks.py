"""Rows taken a few at a time where that is faster. It knows sizes only, no values."""

from collections.abc import Iterator

from torch import Tensor


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
