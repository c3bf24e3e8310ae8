"""dspark: a language model answers faster, with exactly the same answers.

    from dspark import LLM, SamplingParams

Both are imported when they are first asked for: `dspark --help` must not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.core import SamplingParams as SamplingParams
    from dspark.llm import LLM as LLM

_HOMES = {"LLM": "dspark.llm", "SamplingParams": "dspark.core"}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """The public names. Raises `AttributeError` for others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names too, before they are imported."""
    return sorted({*globals(), *__all__})
