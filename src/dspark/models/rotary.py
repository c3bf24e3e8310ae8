"""Rotary position embedding of the drafter, half-split layout. It knows no module and no cache.

Frequencies are plain float32 tensors, so that no cast of a module reaches them: training and
serving compute the same angles at every position.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.errors import ModelError

SCALED_TYPES: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The scalings whose frequencies do not depend on the text's length, and what they need."""


class Rotary:
    """cos and sin of `position * frequency`, computed when asked: no table, no length limit."""

    def __init__(
        self,
        *,
        head_dim: int,
        theta: float,
        scaling: Mapping[str, object] | None,
        max_position_embeddings: int,
        device: torch.device,
    ) -> None:
        """`scaling` is `None` or holds `rope_type` and the parameters of that type.

        Raises `ModelError` for a type or parameter that cannot be computed.
        """
        if scaling is None:
            exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
            inverse_frequency, self.amplitude = 1.0 / theta**exponents, 1.0
        else:
            inverse_frequency, self.amplitude = _scaled(
                head_dim, theta, scaling, max_position_embeddings
            )
        self.inverse_frequency = inverse_frequency.to(device)

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [N, 1, E], for int64 positions [N]."""
        half = positions_N.float()[:, None, None] * self.inverse_frequency
        both = torch.cat((half, half), dim=-1)
        return both.cos() * self.amplitude, both.sin() * self.amplitude


class RotaryTables:
    """cos and sin by position, computed in advance; they grow when a text does."""

    def __init__(self, angles: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        """`angles`: positions [P] to cos and sin [P, E], each row by its own position alone."""
        self._angles = angles
        self._tables: tuple[Tensor, Tensor] | None = None

    def up_to(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Contiguous tables of at least so many rows."""
        if self._tables is None or len(self._tables[0]) < num_positions:
            size = max(512, 1 << (num_positions - 1).bit_length())
            cos_PE, sin_PE = self._angles(torch.arange(size))
            self._tables = cos_PE.contiguous(), sin_PE.contiguous()
        return self._tables


def rotate(x_NHE: Tensor, cos_N1E: Tensor, sin_N1E: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of each head; float32 inside, the dtype of x outside."""
    first, second = x_NHE.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_NHE * cos_N1E + turned * sin_N1E).to(x_NHE.dtype)


def _scaled(
    head_dim: int, theta: float, scaling: Mapping[str, object], max_positions: int
) -> tuple[Tensor, float]:
    """Frequencies and amplitude of a scaled type, by the library that the targets use."""
    rope_type = scaling.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in SCALED_TYPES:
        raise ModelError(
            f"The drafter's rope_type is {rope_type!r}, but it must be default or one of "
            f"{', '.join(SCALED_TYPES)}; convert or retrain the drafter."
        )
    for parameter in SCALED_TYPES[rope_type]:
        if scaling.get(parameter) is None:
            raise ModelError(
                f"The drafter's rope_type {rope_type!r} needs the parameter {parameter!r}, "
                "which its configuration lacks; add it."
            )
    try:
        config = Qwen3Config(
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters={**scaling, "rope_theta": theta},
        )
        inverse_frequency, amplitude = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        is_usable = bool(inverse_frequency.isfinite().all()) and math.isfinite(amplitude)
    except (ArithmeticError, ValueError):
        is_usable = False
    if not is_usable:
        raise ModelError(
            f"The drafter's rope_scaling {dict(scaling)!r} gives no finite frequencies; "
            "write the parameters that the drafter was trained with."
        )
    return inverse_frequency.float(), float(amplitude)
