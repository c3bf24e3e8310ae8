"""Our paged attention as transformers calls it. It knows pages and layouts, no request.

`AttentionInterface` lets any transformers model call a function of ours in place of its own
attention; what the function needs of the step arrives as keyword arguments that transformers
hands down unchanged (`layout_arguments`), and each attention module holds its own two page
tensors (`bind_pages`), so that all layers share one compiled graph.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dspark.core import AttentionLayout
from dspark.errors import InputError
from dspark.kernels import byte_pages
from dspark.kernels.attention import attention
from dspark.kernels.memory import zeros_in_huge_pages

ATTENTION_NAME = "dspark_paged"
_ALIGNMENT = 64  # values between starts of layers: whole cache lines in every dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one attention layer keeps per position."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class KVPages:
    """Keys and values of every layer in pages; pages of one id belong together over layers.

    `keys[layer]`, `values[layer]`: [num_pages, G, page_size, E], or int8 as
    `kernels.byte_pages` has it.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    page_size: int

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerShape],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVPages":
        """Zeroed pages: memory is num_pages * page_size * sum over layers of 2 * G * E values.

        On a CPU all of them lie one after the other in huge pages. Raises `InputError` for a
        page size that int8 (with scales: E + 4 bytes a row) cannot have.
        """
        if dtype == torch.int8:
            if page_size % byte_pages.POSITIONS != 0:
                raise InputError(
                    f"page_size is {page_size}, but with int8 keys and values it must be a "
                    f"multiple of {byte_pages.POSITIONS}."
                )
            blocks = page_size // byte_pages.POSITIONS
            rows = [(blocks, byte_pages.block_bytes(s.head_dim)) for s in layers]
        else:
            rows = [(page_size, s.head_dim) for s in layers]
        shapes = [
            (num_pages, s.num_kv_heads, *row)
            for s, row in zip(layers, rows, strict=True)
            for _ in "kv"
        ]
        sizes = [-(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
        memory = zeros_in_huge_pages([sum(sizes)], dtype=dtype, device=device)
        parts = torch.split(memory, sizes)
        pages = [
            part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)
        ]
        return cls(keys=pages[::2], values=pages[1::2], page_size=page_size)


def resolve_kv_dtype(
    name: str,
    *,
    dtype: torch.dtype,
    quantization: str | None,
    device: torch.device,
    page_size: int | None = None,
) -> torch.dtype:
    """How keys and values are kept: as `int8`, or in the arithmetic's own type, which `bf16` names.

    `auto` is int8 beside int8 weights on a CPU, unless pages of `page_size` cannot hold it. Raises
    `InputError` for another name, and for bf16 where that is not the arithmetic.
    """
    match name:
        case "auto":
            fits = page_size is None or page_size % byte_pages.POSITIONS == 0
            is_int8 = quantization == "int8" and device.type == "cpu" and fits
            return torch.int8 if is_int8 else dtype
        case "int8":
            return torch.int8
        case "bf16" | "bfloat16" if dtype == torch.bfloat16:
            return dtype
        case "bf16" | "bfloat16":
            raise InputError(
                f"kv_cache_dtype is {name!r}, but the arithmetic is fp32, and so are its keys and "
                "values; give auto or int8."
            )
        case _:
            raise InputError(f"kv_cache_dtype is {name!r}, but it must be auto, bf16 or int8.")


def layout_arguments(layout: AttentionLayout) -> dict[str, Tensor]:
    """The keyword arguments that carry a layout through transformers' model code."""
    return {
        "block_tables_RP": layout.block_tables_RP,
        "query_starts_R1": layout.query_starts_R1,
        "visible_N": layout.visible_N,
        "positions_N": layout.positions_N,
        "slots_N": layout.slots_N,
    }


def bind_pages(module: nn.Module, keys: Tensor, values: Tensor) -> None:
    """Give an attention module the pages of its layer."""
    module.dspark_keys, module.dspark_values = keys, values


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the layout says who sees whom)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    probe: "AttentionProbe | None" = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, H, N, E], key and value [1, G, N, E].

    Returns [1, N, H, E] and no attention weights.
    """
    if probe is not None:
        return probe.record(module, query, key, value, sliding_window=sliding_window), None
    block_tables_RP = kwargs["block_tables_RP"]
    keys, values = module.dspark_keys, module.dspark_values
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    out_NHE = attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        keys,
        values,
        block_tables_RP,
        kwargs["query_starts_R1"],
        kwargs["visible_N"],
        kwargs["positions_N"],
        kwargs["slots_N"],
        max_visible=block_tables_RP.shape[1] * byte_pages.page_size_of(keys),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out_NHE.unsqueeze(0), None


class AttentionProbe:
    """Learns, by one pass over one token, which modules attend and what they keep.

    A single token sees only itself, so its attention output is its own value: the probe's pass
    is exact without pages.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.shapes: list[LayerShape] = []
        self.windows: list[int | None] = []

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sliding_window: int | None,
    ) -> Tensor:
        """Note one call; return the value of the only position, [1, 1, H, E]."""
        if key.shape[-1] != value.shape[-1]:
            raise NotImplementedError("keys and values of different head sizes")
        self.modules.append(module)
        self.shapes.append(LayerShape(num_kv_heads=key.shape[1], head_dim=key.shape[-1]))
        self.windows.append(sliding_window)
        repeats = query.shape[1] // key.shape[1]
        return value.repeat_interleave(repeats, dim=1).transpose(1, 2)
