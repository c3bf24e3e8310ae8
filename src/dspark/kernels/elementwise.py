"""What a transformer layer does between its products: norm, gated activation, rotation.

It knows no model; each function has a PyTorch reference and a C++ path for CPUs.
"""

import torch
from torch import Tensor

from dspark.kernels import extension


def _has_fast_path(*tensors: Tensor) -> bool:
    first = tensors[0]
    return (
        extension.IS_LOADED
        and first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.bfloat16)
        and all(tensor.dtype == first.dtype for tensor in tensors)
    )


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x [..., D] over its root mean square, rounded to the dtype of x, times the weight."""
    if _has_fast_path(x, weight_D):
        out: Tensor = torch.ops.dspark.rms_norm(x, weight_D, eps)
        return out
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return weight_D * normed.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side, [..., 2 F] to [..., F]."""
    if _has_fast_path(gate_up):
        out: Tensor = torch.ops.dspark.silu_mul(gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary(q_NHE: Tensor, k_NGE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> None:
    """Rotate q and k in place by tables whose two halves pair dimension i with i + half.

    The tables may be float32 or bfloat16 and shorter than the head (partial rotation); the
    arithmetic is float32, rounded once.
    """
    if _has_fast_path(q_NHE, k_NGE):
        torch.ops.dspark.rotary(q_NHE, k_NGE, cos_NE, sin_NE)
        return
    rotary_dim = cos_NE.shape[-1]
    cos_N1E, sin_N1E = cos_NE.float()[:, None], sin_NE.float()[:, None]
    for x in (q_NHE, k_NGE):
        part = x[..., :rotary_dim].float()
        low, high = part.chunk(2, dim=-1)
        part = part * cos_N1E + torch.cat([-high, low], dim=-1) * sin_N1E
        x[..., :rotary_dim].copy_(part)


def _fake_rms_norm(x: Tensor, _weight_D: Tensor, _eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _fake_silu_mul(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_rotary(_q: Tensor, _k: Tensor, _cos: Tensor, _sin: Tensor) -> None:
    return None


if extension.IS_LOADED:
    torch.library.register_fake("dspark::rms_norm", _fake_rms_norm)
    torch.library.register_fake("dspark::silu_mul", _fake_silu_mul)
    torch.library.register_fake("dspark::rotary", _fake_rotary)
