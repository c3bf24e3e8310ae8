import pytest
import torch

from dspark.data.state_rows import RowCodec, channel_scales
from dspark.errors import InputError


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def test_bf16_rows_come_back_bit_for_bit():
    codec = RowCodec(dtype="bf16", width=96, hidden_size=32)
    row_TX = rows(7, 96).bfloat16()
    encoded = codec.encode(row_TX)
    assert encoded.shape == (7, codec.row_bytes) == (7, 192)
    assert torch.equal(codec.decode(encoded), row_TX)


@pytest.mark.parametrize("outlier", ["channel", "token", "spike"])
def test_int8_rows_are_within_a_percent_of_each_channels_size(outlier: str):
    """UC-122: a channel x1000, a token x1000 and a single number x1000 leave the others whole."""
    row_TX = rows(200, 1152)
    spared = torch.ones(200, 1152, dtype=torch.bool)
    if outlier == "channel":
        row_TX[:, 5] *= 1000.0
        spared[:, 5] = False
    if outlier == "token":
        row_TX[7] *= 1000.0
    if outlier == "spike":
        row_TX[7, 5] = 1000.0
        spared[7, :64] = False  # its group, on its token
    codec = RowCodec(
        dtype="int8", width=1152, hidden_size=576, channel_scale_X=channel_scales(row_TX[50:])
    )
    encoded = codec.encode(row_TX)
    assert encoded.shape == (200, codec.row_bytes) == (200, 1152 + 2 * 18)
    found = codec.decode(encoded).float()
    error_T = ((found - row_TX) * spared).norm(dim=1) / (row_TX * spared).norm(dim=1)
    assert error_T.max().item() < 0.012
    if outlier == "channel":
        assert ((found - row_TX)[:, 5].norm() / row_TX[:, 5].norm()).item() < 0.012


def test_a_group_never_spans_two_layers():
    assert RowCodec(dtype="int8", width=96, hidden_size=32).group == 32
    assert RowCodec(dtype="int8", width=300, hidden_size=100).group == 4


def test_another_dtype_is_refused():
    with pytest.raises(InputError, match="dtype is 'fp8', but it must be bf16 or int8"):
        RowCodec(dtype="fp8", width=96, hidden_size=32)
