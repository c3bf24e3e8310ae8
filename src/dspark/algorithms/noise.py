"""Counter-based noise: (seed, position, stream, token) -> bits, uniform, Gumbel; no hidden state.
It knows no request, no probability and no generator: equal arguments give equal bits anywhere.

The exact function, for a second implementation that must agree bit for bit. All arithmetic is
unsigned and wraps; `>>` shifts zeros in.

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
               z ^= z >> 27;  z *= 0x94D049BB133111EB
               z ^= z >> 31                                    (finaliser of SplitMix64)
    G       =  0x9E3779B97F4A7C15
    key     =  mix64(mix64(seed + G * stream) + G * (position + 1))
    low, high = the lower and upper 32 bits of key             (`row_keys`, once per row)

    x  = token + low                                           (32 bits from here on)
    x ^= x >> 16;  x *= 0x7FEB352D
    x ^= x >> 15;  x += high;  x *= 0x846CA68B
    x ^= x >> 16                                               (`random_bits`)

    u = (int32(x) + 2147483648.5) / 2^32                       (float64, exact, 0 < u < 1)
    g = -log(-log(u))                                          (float64, -3.14 < g < 22.88)

`x` is read as a signed number on its way to `u`. The two 32-bit multipliers are Wellons's
`lowbias32`. Gumbel noise stays in float64 so that the winner of `argmax(score + g)` does not
depend on whose logarithm computed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN_64 = 0x9E3779B97F4A7C15
_MIX_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX_32 = (0x7FEB352D, 0x846CA68B)


class Stream(IntEnum):
    """What a draw is for. Different uses at one position never share bits."""

    TOKEN = 1  # Gumbel noise that drafter and target share
    DRAFT = 2  # inverse-CDF draw of a draft token, maximal coupling
    ACCEPT = 3  # the uniform of the accept test, maximal coupling
    TARGET = 4  # draw from the residual or the target, maximal coupling
    ROUND = 5  # seeds of the rounds of one request
    EXPLORE = 6  # whether a round is verified in full to keep the calibration honest


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundNoise:
    """The randomness of one round of R requests, as counters; all int64 [R].

    `position_R` is the absolute position of the first drafted token (the anchor's plus 1).
    """

    seed_R: Tensor
    position_R: Tensor
    round_R: Tensor  # rounds that the request has had before

    def pick(self, requests: Sequence[int]) -> "RoundNoise":
        """The noise of these requests, in this order; a request may come several times."""
        index = torch.tensor(list(requests), dtype=torch.int64, device=self.seed_R.device)
        return RoundNoise(
            seed_R=self.seed_R[index],
            position_R=self.position_R[index],
            round_R=self.round_R[index],
        )

    def uniforms(self, stream: Stream, *, slots: range) -> Tensor:
        """Uniforms of this round alone, float64 [R, len(slots)]; see `round_seeds`."""
        seed_R1 = round_seeds(self.seed_R, self.round_R)[:, None]
        slot_J = torch.tensor(slots, dtype=torch.int64, device=seed_R1.device)
        key_RJ = row_keys(seed_R1, self.position_R[:, None] + slot_J, stream)
        return uniform(key_RJ.flatten()).view(key_RJ.shape)


def row_keys(seed_R: Tensor, position_R: Tensor, stream: Stream) -> Tensor:
    """64-bit key of each row, int64 [R], from int64 seeds and absolute positions."""
    z_R = _mix64(seed_R + _signed64(_GOLDEN_64 * int(stream)))
    return _mix64(z_R + (position_R + 1) * _signed64(_GOLDEN_64))


def round_seeds(seed_R: Tensor, round_R: Tensor) -> Tensor:
    """A fresh seed for each round of a request, int64 [R].

    Maximal coupling draws a position anew when an earlier round dropped it. With the request's
    own seed the new draft would repeat the dropped one, and a plan that looked at the dropped
    one would have looked at the future (method section 5).
    """
    return row_keys(seed_R, round_R, Stream.ROUND)


def random_bits(key_R: Tensor, token_S: Tensor) -> Tensor:
    """32 bits for each (row, token): int32 [R, S], to be read as unsigned.

    `token_S` holds the same ids for every row ([S]) or each row's own ([R, S]).
    """
    low_R1 = _signed32(key_R)[:, None]
    high_R1 = _signed32(key_R >> 32)[:, None]
    x_RS = token_S.to(torch.int32) + low_R1
    x_RS ^= (x_RS >> 16) & 0xFFFF
    x_RS *= _MIX_32[0]
    x_RS ^= (x_RS >> 15) & 0x1FFFF
    x_RS += high_R1
    x_RS *= _MIX_32[1] - 2**32
    x_RS ^= (x_RS >> 16) & 0xFFFF
    return x_RS


def uniform(key_R: Tensor, token_S: Tensor | None = None) -> Tensor:
    """Uniform numbers in the open interval (0, 1): float64 [R, S], or [R] without tokens."""
    if token_S is None:
        return uniform(key_R, torch.zeros(1, dtype=torch.int64, device=key_R.device))[:, 0]
    u_RS = random_bits(key_R, token_S).to(torch.float64)
    u_RS += 2147483648.5
    u_RS *= 2.0**-32
    return u_RS


def gumbel(key_R: Tensor, token_S: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [R, S]: argmax(log p + g) is a draw from p."""
    g_RS = uniform(key_R, token_S)
    return g_RS.log_().neg_().log_().neg_()


def _mix64(z_R: Tensor) -> Tensor:
    z_R = (z_R ^ _shift_right64(z_R, 30)) * _signed64(_MIX_64[0])
    z_R = (z_R ^ _shift_right64(z_R, 27)) * _signed64(_MIX_64[1])
    return z_R ^ _shift_right64(z_R, 31)


def _shift_right64(z_R: Tensor, bits: int) -> Tensor:
    return (z_R >> bits) & ((1 << (64 - bits)) - 1)


def _signed64(value: int) -> int:
    """The int64 with the same lowest 64 bits; torch has no wrapping unsigned arithmetic."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _signed32(value_R: Tensor) -> Tensor:
    """The int32 with the same lowest 32 bits."""
    low_R = value_R & 0xFFFFFFFF
    return torch.where(low_R >= 2**31, low_R - 2**32, low_R).to(torch.int32)
