"""How one token's hidden states lie in a file: bf16, or int8 with scales. It knows no file.

A row is the taps and the last hidden state side by side, X = M + D numbers. In int8 each number
is divided by its channel's scale, so that a channel of huge values does not drown the others, and
each group of at most 64 channels of a row has a scale of its own, so that a token of huge values
costs its own group only.

Letters: T rows, X channels, G groups of a row, B bytes of a row.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import InputError

DTYPES = ("bf16", "int8")
_GROUP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCodec:
    """Rows of `width` numbers to bytes and back; a section of D numbers is never split."""

    dtype: str
    width: int
    hidden_size: int
    channel_scale_X: Tensor | None = None
    """float32, for int8: the typical size of each channel."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(
                f"The cache's dtype is {self.dtype!r}, but it must be {' or '.join(DTYPES)}."
            )

    @property
    def group(self) -> int:
        """Channels that share a scale: the largest divisor of the hidden size up to 64."""
        return math.gcd(self.hidden_size, _GROUP)

    @property
    def row_bytes(self) -> int:
        """B: bytes of a row."""
        if self.dtype == "bf16":
            return 2 * self.width
        return self.width + 2 * (self.width // self.group)

    def encode(self, row_TX: Tensor) -> Tensor:
        """uint8 [T, B]."""
        if self.dtype == "bf16":
            return row_TX.to(torch.bfloat16).contiguous().cpu().view(torch.uint8)
        assert self.channel_scale_X is not None, "int8 rows need the channels' scales"
        scaled_TX = row_TX.float().cpu() / self.channel_scale_X
        groups_TGg = scaled_TX.view(len(scaled_TX), -1, self.group)
        # bf16 has the range for any outlier; it is rounded up, so that nothing is clipped
        largest_TG = (groups_TGg.abs().amax(dim=2) * (1.0 + 2.0**-7)).clamp(min=1e-30)
        scale_TG = (largest_TG / 127.0).to(torch.bfloat16)
        codes_TGg = (groups_TGg / scale_TG.float()[..., None]).round().clamp(-127, 127)
        codes_TX = codes_TGg.to(torch.int8).view(len(scaled_TX), -1)
        return torch.cat((codes_TX.view(torch.uint8), scale_TG.view(torch.uint8)), dim=1)

    def decode(self, bytes_TB: Tensor) -> Tensor:
        """bf16 [T, X]."""
        if self.dtype == "bf16":
            return bytes_TB.contiguous().view(torch.bfloat16)
        assert self.channel_scale_X is not None, "int8 rows need the channels' scales"
        codes_TX = bytes_TB[:, : self.width].contiguous().view(torch.int8).float()
        scale_TG = bytes_TB[:, self.width :].contiguous().view(torch.bfloat16).float()
        groups_TGg = codes_TX.view(len(codes_TX), -1, self.group) * scale_TG[..., None]
        return (groups_TGg.view(len(codes_TX), -1) * self.channel_scale_X).to(torch.bfloat16)


def channel_scales(row_TX: Tensor) -> Tensor:
    """float32 [X]: root mean square of each channel over some rows, for `RowCodec`."""
    return row_TX.float().square().mean(dim=0).sqrt().clamp(min=1e-6).cpu()
