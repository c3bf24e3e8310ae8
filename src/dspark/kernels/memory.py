"""Memory that is read front to back: large tensors in huge pages, and how fast reading is.

It knows sizes and devices, not what lies in the memory.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.kernels import extension


def zeros_in_huge_pages(
    sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros; on a CPU in huge pages where the system has them and the tensor fills one (2 MiB)."""
    if extension.IS_LOADED and device.type == "cpu":
        out: Tensor = torch.ops.dspark.zeros_in_huge_pages(list(sizes), dtype=dtype)
        return out
    return torch.zeros(*sizes, dtype=dtype, device=device)


def bytes_per_s(num_bytes: int, *, repeats: int = 9) -> float:
    """Best rate at which the threads in use read memory of this size that lies as weights do."""
    sizes = [max(64, num_bytes)]
    memory = zeros_in_huge_pages(sizes, dtype=torch.uint8, device=torch.device("cpu"))
    memory.fill_(1)  # zeros that were never written need not exist
    best_s = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        _read(memory)
        best_s = min(best_s, time.perf_counter() - started)
    return memory.nbytes / best_s


def _read(memory: Tensor) -> int:
    if extension.IS_LOADED:
        return int(torch.ops.dspark.read_all(memory))
    return int(memory[: memory.nbytes // 8 * 8].view(torch.int64).sum())
