"""The compiled operators `torch.ops.dspark.*`, if they were built. It does not know how to build.

Importing this module loads the shared library next to it, as importing any compiled module does.
"""

import logging
from functools import cache
from pathlib import Path

import torch

LIBRARY_PATH = Path(__file__).with_name("_ops.so")


def _load() -> bool:
    if hasattr(torch.ops.dspark, "linear_packed"):  # a sanitizer run loads its own build first
        return True
    if not LIBRARY_PATH.exists():
        return False
    try:
        torch.ops.load_library(str(LIBRARY_PATH))  # type: ignore[no-untyped-call]
    except OSError as error:  # built against another PyTorch
        logging.getLogger("dspark").warning("The C++ operators do not load: %s", error)
        return False
    return True


IS_LOADED: bool = _load() and bool(torch.ops.dspark.is_supported())
"""Whether the C++ operators exist and this processor runs them (AVX2 and FMA at least)."""


def multiplies_on(device: torch.device) -> bool:
    """Whether packed weights on this device are multiplied by the C++ operators."""
    return IS_LOADED and device.type == "cpu"


@cache
def report_path() -> None:
    """Say once, in one line, that the slow path runs, where it does."""
    if not IS_LOADED:
        logging.getLogger("dspark").warning(
            "The C++ operators are not built or do not fit this processor: "
            "PyTorch's own run instead (build them with `python -m dspark.kernels.build`)."
        )
