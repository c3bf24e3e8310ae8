"""Even inputs for int8 products. It knows fused layers and plain products, no model by name.

The inputs of a token share one scale, so a channel that towers over the others leaves them few of
the 255 steps: in SmolLM2 one channel behind a norm is 20 times the root mean square. Divided where
it comes from, in the norm's weight or the rows of `up`, and multiplied in the weights that it
meets, it changes no product (SmoothQuant, Xiao et al. 2023, section 4).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dspark.kernels.linear import PackedLinear
from dspark.kernels.stack import Norm
from dspark.models.fusion import FusedLayer


class InputMeter:
    """Stands in for a linear layer's forward pass and sums up what goes in.

    It multiplies by the packed weight, whose bits do not depend on the number of threads.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self.energy_I = torch.zeros(linear.in_features, dtype=torch.float64)
        """Of each channel the sum over tokens of its square, each token's mean square being 1."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out]."""
        self.energy_I += relative_energy(x.reshape(-1, x.shape[-1]))
        out: Tensor = PackedLinear.pack(self._linear.weight, self._linear.bias)(x)
        return out


@contextmanager
def metered(linears: Sequence[nn.Linear]) -> Iterator[list[InputMeter]]:
    """Meters in place of these layers' forward passes, in their order, until the block ends."""
    meters = [InputMeter(linear) for linear in linears]
    stand_ins: list[Any] = list(linears)
    for linear, meter in zip(stand_ins, meters, strict=True):
        linear.forward = meter
    try:
        yield meters
    finally:
        for linear in stand_ins:
            del linear.forward


def relative_energy(x_NI: Tensor) -> Tensor:
    """float64 [I]: each channel's square, relative to the token's mean square, over all tokens."""
    squares_NI = x_NI.float().square()
    mean_N1 = squares_NI.mean(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return (squares_NI / mean_N1).sum(dim=0, dtype=torch.float64)


def input_factors(energy_I: Tensor, weight_OI: Tensor) -> Tensor:
    """What each input is divided by and its weights multiplied by, float32 [I].

    sqrt(size of the input / size of its weights), which shares the errors of both evenly: it
    is where the sum of the two is smallest if all inputs of a token are near their usual size.
    A channel without input or weight keeps 1. Their geometric mean is about 1.
    """
    weights_I = weight_OI.float().square().mean(dim=0).double()
    logs_I = 0.25 * (energy_I / weights_I).log()
    is_used_I = logs_I.isfinite()
    if not is_used_I.any():
        return torch.ones_like(energy_I, dtype=torch.float32)
    return torch.where(is_used_I, logs_I - logs_I[is_used_I].mean(), 0.0).exp().float()


def products(layer: FusedLayer) -> list[nn.Linear]:
    """The products of a layer, not packed yet, whose inputs can be made even at no cost.

    Those of `o_proj` are even by themselves: mixed by attention, normalised by nothing.
    """
    found: list[nn.Linear] = [layer.qkv, layer.gate_up, layer.down_proj]
    return found


@torch.no_grad()
def smooth(layer: FusedLayer, meters: Sequence[InputMeter]) -> None:
    """Make even the inputs of `products(layer)`, of which `meters` tell; before they are packed."""
    qkv, gate_up, down = products(layer)
    heads_D, middle_D, inner_F = (
        input_factors(meter.energy_I, linear.weight)
        for meter, linear in zip(meters, (qkv, gate_up, down), strict=True)
    )
    layer.norm_in, heads_D = _divided(layer.norm_in, heads_D)
    layer.norm_mid, middle_D = _divided(layer.norm_mid, middle_D)
    multiply_columns(qkv, heads_D)
    multiply_columns(gate_up, middle_D)
    multiply_columns(down, inner_F)
    rows_O = torch.cat((torch.ones_like(inner_F), 1 / inner_F))  # gates, then up
    gate_up.weight = _times(gate_up.weight, rows_O[:, None])
    if gate_up.bias is not None:
        gate_up.bias = _times(gate_up.bias, rows_O)


def multiply_columns(linear: nn.Linear, factors_I: Tensor) -> None:
    """Give the layer a weight of its own, times the factor of each input."""
    linear.weight = _times(linear.weight, factors_I)


def _divided(norm: Norm, factors_D: Tensor) -> tuple[Norm, Tensor]:
    """The norm with a smaller weight, and by how much it really became smaller when rounded."""
    weight_D = _times(norm.weight, 1 / factors_D)
    exact_D = norm.weight.float() / weight_D.float()
    return Norm(weight_D, norm.eps), torch.where(exact_D.isfinite(), exact_D, factors_D)


def _times(tensor: Tensor, factors: Tensor) -> nn.Parameter:
    return nn.Parameter((tensor.float() * factors).to(tensor.dtype), requires_grad=False)
