"""The names under which reports compare arithmetics: bf16, fp32, int8. It computes nothing.

What follows a colon is the type of keys and values: int8:bf16 is int8 weights with keys and values
in bf16; without one it is what `auto` chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What `LLM.load` is told for a name."""

    name: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str


def arithmetics_of(names: Sequence[str]) -> list[Arithmetic]:
    """int8 is weights in 8 bits; what is not quantised then has the machine's usual dtype."""
    if not names:
        raise InputError("No arithmetic was named; name bf16, fp32 or int8.")
    return [_arithmetic(name) for name in names]


def _arithmetic(name: str) -> Arithmetic:
    weights, _, kept = name.partition(":")
    if weights not in ("bf16", "fp32", "int8"):
        raise InputError(f"arithmetic is {name!r}, but it must be bf16, fp32 or int8.")
    is_int8 = weights == "int8"
    return Arithmetic(
        name=name,
        dtype="auto" if is_int8 else weights,
        quantization="int8" if is_int8 else None,
        kv_cache_dtype=kept or "auto",
    )
