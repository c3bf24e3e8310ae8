"""Keys and values as int8 in pages, with a float32 scale for each position and head.

It knows where each byte lies, which is made for the C++ path: blocks of 16 positions in lines of
64 bytes, four bytes for each of 16 lanes, so that products of four bytes need no shuffling. Keys:
line i holds values 4 i to 4 i + 3 of every position, shifted by 128. Values: line (i, j) holds
positions 4 i to 4 i + 3 of values 16 j to 16 j + 15. A line of the 16 scales ends a block.
"""

import torch
from torch import Tensor

from dspark.kernels.linear import quantize

POSITIONS = 16  # of a block
_LANES, _UNIT, _LINE = 16, 4, 64


def block_bytes(head_dim: int) -> int:
    """Bytes of a block for one head; values are padded to whole lanes."""
    return (_padded(head_dim) // _UNIT + 1) * _LINE


def are_bytes(pages: Tensor) -> bool:
    """Whether these pages [num_pages, G, page_size / 16, block_bytes] hold int8."""
    return pages.dtype == torch.int8


def page_size_of(pages: Tensor) -> int:
    """Positions of a page, of pages of any kind."""
    return pages.shape[2] * (POSITIONS if are_bytes(pages) else 1)


def rounded(x: Tensor) -> Tensor:
    """Rows [..., E] as int8 holds them, float32."""
    values, scales = quantize(x)
    return values.float() * scales[..., None]


def write(pages: Tensor, x_NGE: Tensor, slots_N: Tensor, *, is_key: bool) -> None:
    """Rows of tokens into their places, in place."""
    values_NGE, scales_NG = quantize(x_NGE)
    width = _padded(x_NGE.shape[-1])
    values_NGE = torch.nn.functional.pad(values_NGE, (0, width - x_NGE.shape[-1]))
    page_size = page_size_of(pages)
    pages_N, rows_N = slots_N // page_size, slots_N % page_size
    blocks_N, lanes_N = rows_N // POSITIONS, rows_N % POSITIONS
    if is_key:
        keys = (values_NGE ^ -128).reshape(*scales_NG.shape, width // _UNIT, _UNIT)
        _keys(pages)[pages_N, :, blocks_N, lanes_N] = keys
    else:
        values = values_NGE.reshape(*scales_NG.shape, width // _LANES, _LANES)
        _values(pages)[pages_N, :, blocks_N, lanes_N // _UNIT, lanes_N % _UNIT] = values
    _scales(pages)[pages_N, :, blocks_N, lanes_N] = scales_NG


def read(pages: Tensor, *, head_dim: int, is_key: bool) -> Tensor:
    """All that some pages hold, float32 [num_pages, G, page_size, E]."""
    values = _values(pages).flatten(3, 4) if not is_key else _keys(pages) ^ -128
    rows = values.flatten(-2).float() * _scales(pages)[..., None]
    return rows.flatten(2, 3)[..., :head_dim]


def fill_with_noise(pages: Tensor, generator: torch.Generator) -> None:
    """Values between -2 and 2 in every place."""
    pages.random_(-127, 128, generator=generator)
    _scales(pages).fill_(2 / 127)


def _padded(head_dim: int) -> int:
    return -(-head_dim // _LANES) * _LANES


def _lines(pages: Tensor) -> Tensor:
    """[num_pages, G, blocks, line, lane, byte]; a view, as are all below."""
    num_lines = pages.shape[-1] // _LINE - 1
    return pages[..., :-_LINE].view(*pages.shape[:3], num_lines, _LANES, _UNIT)


def _keys(pages: Tensor) -> Tensor:
    """[num_pages, G, blocks, position, E / 4, byte]."""
    return _lines(pages).transpose(-3, -2)


def _values(pages: Tensor) -> Tensor:
    """[num_pages, G, blocks, position / 4, position mod 4, E / 16, lane]."""
    lines = _lines(pages)
    num_units = POSITIONS // _UNIT
    units = lines.view(*lines.shape[:3], num_units, lines.shape[3] // num_units, _LANES, _UNIT)
    return units.movedim(-1, -3)


def _scales(pages: Tensor) -> Tensor:
    """float32 [num_pages, G, blocks, position]."""
    return pages.view(torch.float32)[..., -POSITIONS:]
