"""Memory that is read front to back: large tensors in huge pages, and plain reading.

It knows sizes and devices, not what lies in the memory.
"""

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


class Stream:
    """Memory of so many bytes that lies as weights do, to be read by the threads in use."""

    def __init__(self, num_bytes: int) -> None:
        sizes = [max(64, num_bytes)]
        self._memory = zeros_in_huge_pages(sizes, dtype=torch.uint8, device=torch.device("cpu"))
        self._memory.fill_(1)  # zeros that were never written need not exist

    @property
    def num_bytes(self) -> int:
        """What one `read` reads: 64 at least."""
        return self._memory.nbytes

    def read(self) -> int:
        """Read it once, front to back; what comes back tells that all of it was read."""
        if extension.IS_LOADED:
            return int(torch.ops.dspark.read_all(self._memory))
        return int(self._memory[: self.num_bytes // 8 * 8].view(torch.int64).sum())
