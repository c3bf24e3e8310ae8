"""Where a figure was measured: processor, threads, versions. It measures nothing."""

import platform
from dataclasses import dataclass
from typing import Self

import torch

from dspark.kernels import extension
from dspark.machine import installed_version, processor


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a reader needs to judge a figure."""

    processor: str
    num_threads: int
    python: str
    torch: str
    transformers: str
    dspark: str
    native_kernels: bool
    """Whether the C++ operators are in use, or PyTorch's."""

    @classmethod
    def here(cls) -> Self:
        """This process on this machine."""
        return cls(
            processor=processor(),
            num_threads=torch.get_num_threads(),
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=installed_version("transformers") or "not installed",
            dspark=installed_version("dspark") or "not installed",
            native_kernels=extension.IS_LOADED,
        )

    def sentence(self) -> str:
        """One line above a table."""
        kernels = "C++ operators" if self.native_kernels else "PyTorch's own operators"
        return (
            f"{self.processor}, {self.num_threads} threads, torch {self.torch}, "
            f"dspark {self.dspark} with {kernels}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as `--dtype` takes it."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
