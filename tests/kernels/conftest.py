"""Runs the operator tests once for each instruction set that this machine has."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from dspark.kernels import extension

settings.register_profile("kernels", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("kernels")

INSTRUCTION_SETS = ["avx2", "avx512", "avx512vnni", "avx512bf16", "amx"]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """The C++ operators restricted to one instruction set; the best one again afterwards."""
    if not extension.IS_LOADED:
        pytest.skip("the C++ operators are not built")
    if not torch.ops.dspark.use_instructions(INSTRUCTION_SETS.index(request.param)):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    for number in reversed(range(len(INSTRUCTION_SETS))):
        if torch.ops.dspark.use_instructions(number):
            break
