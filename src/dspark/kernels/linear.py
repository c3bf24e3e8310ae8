"""Matrix products for few tokens: weights packed once for the processor, then streamed.

It knows no model, only that `nn.Linear` is y = x W^T + b. On the C++ path each token's result has
the same bits whatever other tokens share the pass; sums over the inputs run in one fixed order.
"""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor, nn

from dspark.errors import InputError
from dspark.kernels import extension

Quantization = Literal["int8"]

# Partial sums of 127 * 127 * 1024 stay below 2^24, where float32 holds every integer.
_EXACT_CHUNK = 1024


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """PyTorch's own product: the reference of the packed paths."""
    return nn.functional.linear(x, weight_OI, bias_O)


def check_quantization(name: str | None) -> None:
    """Raises `InputError` for a way of storing weights that there is not; `None` is as they are."""
    if name not in (None, "int8"):
        raise InputError(
            f"quantization is {name!r}, but it must be int8; leave it out for weights as they are."
        )


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the order in which the processor streams it.

    bfloat16 and float32 weights multiply inputs of their own dtype and add in float32. With
    "int8", each output channel has a scale (largest weight / 127), each token a scale found at
    run time, and the sums are integers: exact, hence equal on every machine.
    """

    packed: Tensor
    """C++ path: the packed weight; else the plain weight [out, in] (int8 if quantized)."""
    bias: Tensor | None
    scales_O: Tensor | None
    """float32, per output channel, only with quantization."""
    sums_O: Tensor | None
    """int32, sum over the inputs of each quantized output channel, only with quantization."""

    def __init__(
        self,
        *,
        packed: Tensor,
        bias: Tensor | None,
        scales_O: Tensor | None,
        sums_O: Tensor | None,
        in_features: int,
        out_features: int,
        is_compiled: bool,
    ) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("scales_O", scales_O, persistent=False)
        self.register_buffer("sums_O", sums_O, persistent=False)
        self.in_features = in_features
        self.out_features = out_features
        self.is_compiled = is_compiled

    @classmethod
    @torch.no_grad()
    def pack(
        cls, weight_OI: Tensor, bias_O: Tensor | None = None, *, quantization: str | None = None
    ) -> Self:
        """Pack a weight [out, in]; the result shares no memory with it on the C++ path."""
        check_quantization(quantization)
        weight_OI = weight_OI.detach()
        bias_O = None if bias_O is None else bias_O.detach().clone()
        scales_O = sums_O = None
        is_compiled = extension.multiplies_on(weight_OI.device)
        if quantization == "int8":
            weight_OI, scales_O = quantize(weight_OI)
            sums_O = weight_OI.sum(dim=1, dtype=torch.int32)
        elif weight_OI.dtype not in (torch.bfloat16, torch.float32):
            is_compiled = False
        out_features, in_features = weight_OI.shape
        if is_compiled and bias_O is not None:
            bias_O = bias_O.float()  # added before the sum is rounded
        return cls(
            packed=torch.ops.dspark.pack_linear(weight_OI) if is_compiled else weight_OI,
            bias=bias_O,
            scales_O=scales_O,
            sums_O=sums_O,
            in_features=in_features,
            out_features=out_features,
            is_compiled=is_compiled,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in the dtype of x."""
        if self.scales_O is not None:
            if self.is_compiled:
                assert self.sums_O is not None
                out: Tensor = torch.ops.dspark.linear_int8(
                    x, self.packed, self.scales_O, self.sums_O, self.bias
                )
                return out
            return linear_int8_reference(x, self.packed, self.scales_O, self.bias)
        if self.is_compiled:
            y: Tensor = torch.ops.dspark.linear_packed(
                x.to(self.packed.dtype), self.packed, self.bias, self.out_features
            )
        else:
            y = linear(x.to(self.packed.dtype), self.packed, self.bias)
        return y.to(x.dtype)

    @property
    def parts(self) -> list[Tensor | None]:
        """What an operator that runs several products in one call takes of each."""
        return [self.packed, self.bias, self.scales_O, self.sums_O]

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        kind = "int8" if self.scales_O is not None else str(self.packed.dtype)
        return f"{self.in_features} -> {self.out_features}, {kind}, compiled={self.is_compiled}"


def replace_linears(
    module: nn.Module, quantization: str | None = None, *, exact: Sequence[nn.Module] = ()
) -> None:
    """Swap every `nn.Linear` below `module` for its packed form, in place; those that are `exact`
    keep their own type of weights.

    The plain weight is dropped with its layer; one that another module shares (a tied embedding)
    lives on there and stays reachable as `weight` of the packed layer.
    """
    extension.report_path()
    owners: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                own = None if any(child is one for one in exact) else quantization
                packed = PackedLinear.pack(child.weight, child.bias, quantization=own)
                if owners[id(child.weight)] > 1:
                    packed.weight = child.weight
                packed.train(child.training)
                setattr(parent, name, packed)


def side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One product whose outputs are those of the given ones, one after the other."""
    weight_OI = torch.cat([linear.weight.data for linear in linears])
    biases: list[Tensor | None] = [linear.bias for linear in linears]
    has_bias = any(bias is not None for bias in biases)
    joined = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=has_bias, device="meta")
    joined.weight = nn.Parameter(weight_OI, requires_grad=False)
    if has_bias:
        parts = [
            linear.weight.new_zeros(linear.out_features) if bias is None else bias.data
            for linear, bias in zip(linears, biases, strict=True)
        ]
        joined.bias = nn.Parameter(torch.cat(parts), requires_grad=False)
    return joined


def quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to int8 in [-127, 127] and one float32 scale each: row ~ scale * int8 row.

    Serves weights (a row is an output channel) and activations (a row is a token) alike. The
    arithmetic is that of the C++ path, operation by operation.
    """
    rows = weight_OI.float()
    largest_O = rows.abs().amax(dim=-1)
    full_O = torch.full_like(largest_O, 127.0)  # a Python 127.0 would divide by a reciprocal
    inverse_O = torch.where(largest_O > 0, full_O / largest_O, 0.0)
    return torch.round(rows * inverse_O[..., None]).to(torch.int8), largest_O / full_O


def linear_int8_reference(
    x: Tensor, weight_OI: Tensor, scales_O: Tensor, bias_O: Tensor | None
) -> Tensor:
    """x [..., in] times int8 weights, exact integer sums; bit for bit the C++ path's result."""
    quantized_NI, scales_N = quantize(x.reshape(-1, x.shape[-1]))
    y_NO = _integer_product(quantized_NI, weight_OI).float() * scales_N[:, None] * scales_O
    if bias_O is not None:
        y_NO = y_NO + bias_O.float()
    return y_NO.to(x.dtype).view(*x.shape[:-1], -1)


def _integer_product(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    """Exact a @ b^T of int8 matrices on any device, by float32 products of exact chunks."""
    total_NO = torch.zeros(len(a_NI), len(b_OI), dtype=torch.int32, device=a_NI.device)
    for start in range(0, a_NI.shape[1], _EXACT_CHUNK):
        part = slice(start, start + _EXACT_CHUNK)
        total_NO += (a_NI[:, part].float() @ b_OI[:, part].float().T).to(torch.int32)
    return total_NO


def _fake_linear(x: Tensor, _packed: Tensor, _bias_O: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _fake_linear_int8(
    x: Tensor, _packed: Tensor, scales_O: Tensor, _sums_O: Tensor, _bias_O: Tensor | None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], scales_O.shape[0])


if extension.IS_LOADED:
    torch.library.register_fake("dspark::linear_packed", _fake_linear)
    torch.library.register_fake("dspark::linear_int8", _fake_linear_int8)
