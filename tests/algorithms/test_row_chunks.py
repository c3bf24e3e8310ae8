"""Chunks cover all rows once, in order."""

import pytest
import torch

from dspark.algorithms.row_chunks import row_chunks


@pytest.mark.parametrize(
    ("num_rows", "width", "num_chunks"),
    [(0, 5, 0), (7, 49_152, 7), (7, 20_000, 3), (1000, 4, 1), (3, 0, 1)],
)
def test_chunks_cover_each_row_once(num_rows: int, width: int, num_chunks: int):
    chunks = list(row_chunks(torch.empty(num_rows, width)))
    assert [row for chunk in chunks for row in range(num_rows)[chunk]] == list(range(num_rows))
    assert len(chunks) == num_chunks


def test_other_devices_take_all_rows_at_once():
    assert list(row_chunks(torch.empty(7, 49_152, device="meta"))) == [slice(0, 7)]
