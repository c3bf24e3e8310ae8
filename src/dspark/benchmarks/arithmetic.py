"""The names under which reports compare arithmetics: bf16, fp32, int8. It computes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What `LLM.load` is told for a name."""

    name: str
    dtype: str
    quantization: str | None


def arithmetics_of(names: Sequence[str]) -> list[Arithmetic]:
    """int8 is weights in 8 bits; what is not quantised then has the machine's usual dtype."""
    if not names:
        raise InputError("No arithmetic was named; name bf16, fp32 or int8.")
    for name in names:
        if name not in ("bf16", "fp32", "int8"):
            raise InputError(f"arithmetic is {name!r}, but it must be bf16, fp32 or int8.")
    return [
        Arithmetic(name=name, dtype="auto", quantization="int8")
        if name == "int8"
        else Arithmetic(name=name, dtype=name, quantization=None)
        for name in names
    ]
