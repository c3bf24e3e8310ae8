import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dspark.errors import InputError
from dspark.kernels import extension
from dspark.kernels.linear import (
    PackedLinear,
    linear,
    linear_int8_reference,
    quantize,
    replace_linears,
)

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")]

shapes = st.tuples(st.integers(1, 40), st.integers(1, 150), st.integers(1, 200))  # N, O, I


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def error_bound(x: Tensor, weight: Tensor, exact: Tensor) -> Tensor:
    """Rounding of float32 sums, and of the result to the dtype of x."""
    size = x.double().abs() @ weight.double().abs().T
    return 2e-6 * size + exact.abs() * (2**-8 if x.dtype == torch.bfloat16 else 2**-22) + 1e-30


@given(shape=shapes, dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_packed_product_is_the_product(
    instructions: str, shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    num_tokens, num_outputs, num_inputs = shape
    weight = random(num_outputs, num_inputs, seed=seed, dtype=dtype)
    bias = random(num_outputs, seed=seed + 1, dtype=dtype) if has_bias else None
    x = random(num_tokens, num_inputs, seed=seed + 2, dtype=dtype)
    packed = PackedLinear.pack(weight, bias)
    assert packed.is_compiled
    y = packed(x)
    assert y.dtype == dtype
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert bool(((y.double() - exact).abs() <= error_bound(x, weight, exact)).all())


@given(shape=shapes, dtype=st.sampled_from(DTYPES), has_bias=st.booleans(), seed=st.integers(0, 99))
def test_int8_product_has_the_bits_of_the_reference(
    instructions: str, shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    """Integer sums are exact, so every machine and the plain PyTorch path agree."""
    num_tokens, num_outputs, num_inputs = shape
    weight = random(num_outputs, num_inputs, seed=seed, dtype=dtype)
    bias = random(num_outputs, seed=seed + 1, dtype=dtype) if has_bias else None
    x = random(num_tokens, num_inputs, seed=seed + 2, dtype=dtype)
    quantized, scales = quantize(weight)
    packed = PackedLinear.pack(weight, bias, quantization="int8")
    assert torch.equal(packed(x), linear_int8_reference(x, quantized, scales, bias))


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(100, 70), (64, 576), (1, 33), (40, 128), (96, 64)]
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    instructions: str,
    dtype: torch.dtype,
    quantization: str | None,
    num_outputs: int,
    num_inputs: int,
) -> None:
    weight = random(num_outputs, num_inputs, seed=1, dtype=dtype)
    bias = random(num_outputs, seed=2, dtype=dtype)
    packed = PackedLinear.pack(weight, bias, quantization=quantization)
    x = random(300, num_inputs, seed=3, dtype=dtype)
    alone = torch.cat([packed(x[n : n + 1]) for n in range(300)])
    for num_tokens in range(1, 301):
        assert torch.equal(packed(x[:num_tokens]), alone[:num_tokens])
    assert torch.equal(packed(x[150:].clone()), alone[150:])


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_tokens"),
    [
        (40, 8192, 150),  # more inputs than the second-level cache holds
        (33, 1600, 70),  # a panel that the first-level cache does not hold
        (32800, 64, 40),  # logits
    ],
)
def test_large_layers_keep_the_bits_of_each_row(
    instructions: str,
    dtype: torch.dtype,
    quantization: str | None,
    num_outputs: int,
    num_inputs: int,
    num_tokens: int,
) -> None:
    packed = PackedLinear.pack(
        random(num_outputs, num_inputs, seed=1, dtype=dtype), quantization=quantization
    )
    x = random(num_tokens, num_inputs, seed=2, dtype=dtype)
    y = packed(x)
    for n in (0, 15, 16, num_tokens // 2, num_tokens - 1):
        assert torch.equal(y[n], packed(x[n]))


@given(
    num_tokens=st.integers(1, 100),
    num_outputs=st.integers(1, 130),
    num_units=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shapes_that_fill_tiles_give_the_product(
    instructions: str,
    num_tokens: int,
    num_outputs: int,
    num_units: int,
    kind: tuple[torch.dtype, str | None],
    has_bias: bool,
    seed: int,
) -> None:
    """Rows of whole tiles of 64 bytes: the path of nearly every layer of a real model."""
    dtype, quantization = kind
    num_inputs = num_units * (64 if quantization == "int8" else 64 // dtype.itemsize)
    weight = random(num_outputs, num_inputs, seed=seed, dtype=dtype)
    bias = random(num_outputs, seed=seed + 1, dtype=dtype) if has_bias else None
    x = random(num_tokens, num_inputs, seed=seed + 2, dtype=dtype)
    y = PackedLinear.pack(weight, bias, quantization=quantization)(x)
    if quantization == "int8":
        assert torch.equal(y, linear_int8_reference(x, *quantize(weight), bias))
    else:
        exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert bool(((y.double() - exact).abs() <= error_bound(x, weight, exact)).all())


def test_int8_results_below_the_normal_numbers_keep_their_bits(instructions: str) -> None:
    weight = random(64, 64, seed=1, dtype=torch.float32) * 1e-20
    x = (random(40, 64, seed=2, dtype=torch.float32) * 1e-20).bfloat16()
    y = PackedLinear.pack(weight, quantization="int8")(x)
    is_denormal = (y != 0) & (y.abs() < torch.finfo(torch.bfloat16).tiny)
    assert bool(is_denormal.any())
    assert torch.equal(y, linear_int8_reference(x, *quantize(weight), None))


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_bits_do_not_depend_on_the_number_of_threads(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    packed = PackedLinear.pack(
        random(300, 96, seed=1, dtype=dtype), None, quantization=quantization
    )
    x = random(600, 96, seed=2, dtype=dtype)
    num_threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(packed(x))
    torch.set_num_threads(num_threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_any_leading_shape_and_stride_is_served(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    packed = PackedLinear.pack(random(20, 24, seed=1, dtype=dtype), quantization=quantization)
    x = random(3, 5, 48, seed=2, dtype=dtype)
    expected = packed(x[..., :24].contiguous().view(15, 24)).view(3, 5, 20)
    assert torch.equal(packed(x[..., :24]), expected)
    assert torch.equal(packed(x[0, 0, :24]), expected[0, 0])
    assert torch.equal(packed(x[..., :24].transpose(0, 1)), expected.transpose(0, 1))
    every_second = x[..., ::2]
    assert torch.equal(packed(every_second), packed(every_second.contiguous()))
    assert packed(x[:0, :, :24]).shape == (0, 5, 20)


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_broken_token_shows_and_spoils_no_other(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    packed = PackedLinear.pack(random(33, 64, seed=1, dtype=dtype), quantization=quantization)
    x = random(9, 64, seed=2, dtype=dtype)
    expected = packed(x)
    for value in (torch.nan, torch.inf):
        broken = x.clone()
        broken[4, 7] = value
        y = packed(broken)
        assert not bool(y[4].isfinite().any())
        assert torch.equal(y[:4], expected[:4])
        assert torch.equal(y[5:], expected[5:])


def test_int8_of_zeros_is_the_bias(instructions: str) -> None:
    bias = random(7, seed=1, dtype=torch.float32)
    packed = PackedLinear.pack(torch.zeros(7, 5), bias, quantization="int8")
    assert torch.equal(packed(torch.zeros(2, 5)), bias.expand(2, 7))


def test_int8_is_within_its_rounding_of_the_plain_product() -> None:
    weight = random(64, 256, seed=1, dtype=torch.float32)
    x = random(8, 256, seed=2, dtype=torch.float32)
    exact = linear(x, weight)
    error = PackedLinear.pack(weight, quantization="int8")(x) - exact
    assert 0 < float(error.norm() / exact.norm()) < 0.02


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(InputError, match="quantization is 'int3'"):
        PackedLinear.pack(torch.ones(2, 2), quantization="int3")


class Tied(nn.Module):
    """An embedding, a small stack, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.stack = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16, bias=False))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.stack(self.embedding(ids)))
        return out


@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 1e-6), ("int8", 0.05)])
def test_replaced_layers_compute_the_same_model(quantization: str | None, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Tied().eval().requires_grad_(False)
    ids = torch.arange(50)
    expected = model(ids)
    replace_linears(model, quantization)
    kinds = [type(module) for module in (model.stack[0], model.stack[2], model.head)]
    assert kinds == [PackedLinear] * 3
    assert float((model(ids) - expected).norm() / expected.norm()) < tolerance
    assert model.head.weight is model.embedding.weight
    assert not hasattr(model.stack[0], "weight")
    assert list(dict(model.named_parameters())) == ["embedding.weight"]


def test_without_the_extension_the_layer_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "IS_LOADED", False)
    weight, bias = random(9, 5, seed=1, dtype=torch.float32), random(9, seed=2, dtype=torch.float32)
    x = random(3, 5, seed=3, dtype=torch.float32)
    packed = PackedLinear.pack(weight, bias)
    assert not packed.is_compiled
    assert torch.equal(packed(x), linear(x, weight, bias))
    quantized, scales = quantize(weight)
    int8 = PackedLinear.pack(weight, bias, quantization="int8")
    assert torch.equal(int8(x), linear_int8_reference(x, quantized, scales, bias))


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_operators_keep_pytorchs_rules(
    instructions: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Schema, shapes under `torch.compile` and dispatch, by PyTorch's own checker."""
    packed = PackedLinear.pack(random(20, 24, seed=1, dtype=dtype), quantization=quantization)
    x = random(2, 3, 24, seed=2, dtype=dtype)
    if quantization is None:
        arguments = (x, packed.packed, packed.bias, 20)
        torch.library.opcheck(torch.ops.dspark.linear_packed.default, arguments)
    else:
        arguments = (x, packed.packed, packed.scales_O, packed.sums_O, packed.bias)
        torch.library.opcheck(torch.ops.dspark.linear_int8.default, arguments)
