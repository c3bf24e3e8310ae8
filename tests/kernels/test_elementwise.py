import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.kernels import extension
from dspark.kernels.elementwise import rms_norm, rotary, silu_mul

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def reference(function: object, *arguments: object) -> Tensor:
    """The same function on PyTorch's path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "IS_LOADED", False)
        out: Tensor = function(*arguments)  # type: ignore[operator]
    return out


def assert_near(out: Tensor, expected: Tensor) -> None:
    rounding = ROUNDING[out.dtype]
    torch.testing.assert_close(out, expected, rtol=rounding, atol=rounding * 0.1)


@given(n=st.integers(1, 9), width=st.integers(1, 200), dtype=dtypes, seed=st.integers(0, 99))
def test_norm_is_its_reference(
    instructions: str, n: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    x = random(n, 2, width, seed=seed, dtype=dtype)
    weight = random(width, seed=seed + 1, dtype=dtype)
    assert_near(rms_norm(x, weight, 1e-5), reference(rms_norm, x, weight, 1e-5))
    strided = x[:, 0]
    assert torch.equal(rms_norm(strided, weight, 1e-5), rms_norm(x, weight, 1e-5)[:, 0])


@given(n=st.integers(1, 9), width=st.integers(1, 100), dtype=dtypes, seed=st.integers(0, 99))
def test_gated_activation_is_its_reference(
    instructions: str, n: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    gate_up = 5 * random(n, 2 * width, seed=seed, dtype=dtype)
    assert_near(silu_mul(gate_up), reference(silu_mul, gate_up))


def test_gated_activation_of_extreme_gates_is_finite(instructions: str) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -100.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[0.0, 1e4, 0.0, 0.0]]))


@given(
    n=st.integers(1, 9),
    half=st.integers(1, 40),
    rest=st.integers(0, 5),
    dtype=dtypes,
    table_dtype=dtypes,
    seed=st.integers(0, 99),
)
def test_rotation_is_its_reference(
    instructions: str,
    n: int,
    half: int,
    rest: int,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    seed: int,
) -> None:
    angles = random(n, 2 * half, seed=seed, dtype=torch.float32)
    tables = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    qk = [
        random(3, n, 2 * half + rest, seed=seed + 1, dtype=dtype).transpose(0, 1),
        random(n, 2, 2 * half + rest, seed=seed + 2, dtype=dtype),
    ]
    expected = [x.clone() for x in qk]
    rotary(*qk, *tables)
    reference(rotary, *expected, *tables)
    for x, wanted in zip(qk, expected, strict=True):
        assert_near(x, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_pytorchs_rules(instructions: str, dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 10, seed=1, dtype=dtype), random(10, seed=2, dtype=dtype)
    torch.library.opcheck(torch.ops.dspark.rms_norm.default, (x, weight, 1e-5))
    torch.library.opcheck(torch.ops.dspark.silu_mul.default, (x,))
    table = random(2, 8, seed=3, dtype=torch.float32)
    torch.library.opcheck(torch.ops.dspark.rotary.default, (x, x.clone(), table, table))
