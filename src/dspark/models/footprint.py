"""What a model will take of a device's memory, from the headers of its files alone.

It reads no weight and allocates nothing, so it can refuse before the first byte (UC-166).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.errors import CapacityError
from dspark.kernels import byte_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one model once it is loaded."""

    name: str
    weights: int
    """Of all tensors in the arithmetic's type."""
    per_position: int
    """Keys and values of one position in all layers; of a drafter also the taps of a position
    that it has not taken in yet (`engine.backlog`)."""

    @classmethod
    def of(
        cls,
        folder: str | Path,
        *,
        name: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> "Footprint | None":
        """Of a directory with config.json and safetensors; `None` where these do not tell.

        `kv_dtype`: of keys and values, `None` is `dtype`.
        """
        path = Path(folder)
        try:
            config = json.loads((path / "config.json").read_text())
            counts = [_count(file) for file in sorted(path.glob("*.safetensors"))]
        except (OSError, ValueError, SafetensorError):
            return None  # a hub name, or damaged files: loading them says what is wrong
        if not counts or not isinstance(config, dict):
            return None
        return cls(
            name=name,
            weights=sum(counts) * dtype.itemsize,
            per_position=_bytes_per_position(
                config, dtype, dtype if kv_dtype is None else kv_dtype
            ),
        )


def check_memory(
    needs: Sequence[Footprint], *, num_positions: int, free_bytes: int | None, device: str
) -> None:
    """Raises `CapacityError` with the numbers if the models and their caches cannot fit.

    `num_positions`: that the caches hold. `free_bytes` `None`: nobody knows, nothing is checked.
    """
    sizes = [(need.name, need.weights, need.per_position * num_positions) for need in needs]
    needed = sum(weights + cache for _, weights, cache in sizes)
    if free_bytes is None or needed <= free_bytes:
        return
    parts = ", ".join(f"{n} {_gigabytes(w)} and {_gigabytes(c)}" for n, w, c in sizes)
    raise CapacityError(
        f"{_gigabytes(needed)} of memory are needed on {device} (weights, and keys and values of "
        f"{num_positions:,} positions: {parts}), but {_gigabytes(free_bytes)} are free; choose a "
        "smaller model, fewer positions, or another device."
    )


def _count(file: Path) -> int:
    with safe_open(file, framework="pt") as tensors:
        total = 0
        for key in tensors.keys():  # noqa: SIM118 (not a mapping)
            size = 1
            for length in tensors.get_slice(key).get_shape():
                size *= length
            total += size
        return total


def _bytes_per_position(
    config: Mapping[str, Any], dtype: torch.dtype, kv_dtype: torch.dtype
) -> int:
    text = config.get("text_config") or config
    heads = int(text.get("num_attention_heads") or 0)
    groups = int(text.get("num_key_value_heads") or heads)
    size = int(text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0))
    taps = len(config.get("target_layer_ids") or ()) * int(config.get("hidden_size") or 0)
    rows = 2 * int(text.get("num_hidden_layers") or 0) * groups
    if kv_dtype == torch.int8:
        row_bytes = byte_pages.block_bytes(size) // byte_pages.POSITIONS
    else:
        row_bytes = size * kv_dtype.itemsize
    return rows * row_bytes + taps * dtype.itemsize


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
