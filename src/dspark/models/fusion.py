"""Decoder layers of the common pattern run as a dozen fused operators instead of sixty small ones.

It knows the pattern (norm, q/k/v, rotary, attention, norm, gated MLP), no model by name: a layer
is replaced only if its parts are all there AND it computes what transformers' own layer computes
on the same input. All others stay as they are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dspark.kernels.attention import attention
from dspark.kernels.elementwise import rms_norm, rotary, silu_mul
from dspark.kernels.linear import PackedLinear, side_by_side
from dspark.kernels.stack import Norm, StackLayer

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference from transformers' layer, relative to its largest output."""


class FusedLayer(nn.Module):
    """A pre-norm decoder layer: x += o(attn(rope(qkv(norm(x))))); x += down(silu(gate) * up)."""

    def __init__(self, layer: Any, *, window: int | None) -> None:
        super().__init__()
        attn, mlp = layer.self_attn, layer.mlp
        self.qkv = side_by_side(attn.q_proj, attn.k_proj, attn.v_proj)
        self.o_proj = attn.o_proj
        self.gate_up = side_by_side(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.norm_in = _norm_of(layer.input_layernorm)
        self.norm_mid = _norm_of(layer.post_attention_layernorm)
        self.head_norms = None
        if hasattr(attn, "q_norm"):
            self.head_norms = (_norm_of(attn.q_norm), _norm_of(attn.k_norm))
        self.head_dim: int = attn.head_dim
        self.num_heads: int = attn.o_proj.in_features // self.head_dim
        self.num_kv_heads: int = attn.k_proj.out_features // self.head_dim
        self.scale: float = attn.scaling
        self.window = window
        self._holder: list[Any] = [attn]  # pages live on the module that transformers would call
        self._parts: list[Any] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the layer runs as one operator."""
        return self._parts is not None

    def join(self) -> None:
        """After packing: run as one operator where every product has a compiled form."""
        layer = self.stack_layer()
        has_whole_groups = self.gate_up.out_features % 16 == 0  # nothing padded to take away
        if layer.is_compiled and has_whole_groups:
            products = [*layer.heads, layer.out, layer.gate_up, layer.down]
            parts = [(p.packed, p.bias, p.scales_O, p.sums_O) for p in products]
            self._parts = [part for product in parts for part in product]

    def stack_layer(self) -> StackLayer:
        """The layer's packed parts, as a stack of several layers takes them."""
        return StackLayer(
            norm_in=self.norm_in,
            norm_mid=self.norm_mid,
            head_norms=self.head_norms,
            heads=[cast(PackedLinear, self.qkv)],
            out=self.o_proj,
            gate_up=cast(PackedLinear, self.gate_up),
            down=self.down_proj,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
            window=self.window,
        )

    def _joined(
        self, x_ND: Tensor, cos_NE: Tensor, sin_NE: Tensor, layout: Sequence[Tensor]
    ) -> Tensor:
        norms = [self.norm_in, self.norm_mid, *(self.head_norms or ())]
        pages = self._holder[0]
        out: Tensor = torch.ops.dspark.decoder_layer(
            x_ND,
            [weight for weight, _ in norms],
            [eps for _, eps in norms],
            self._parts,
            [self.head_dim, self.num_heads, self.num_kv_heads],
            cos_NE,
            sin_NE,
            pages.dspark_keys,
            pages.dspark_values,
            *layout,
            self.scale,
            self.window,
        )
        return out

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        block_tables_RP: Tensor,
        query_starts_R1: Tensor,
        visible_N: Tensor,
        positions_N: Tensor,
        slots_N: Tensor,
        **_: Any,
    ) -> Tensor:
        """[1, N, D] to [1, N, D], the arguments being those of transformers and of our layout."""
        x_ND = hidden_states[0]
        cos_1NE, sin_1NE = position_embeddings
        if self._parts is not None:
            layout = (block_tables_RP, query_starts_R1, visible_N, positions_N, slots_N)
            return self._joined(x_ND, cos_1NE[0], sin_1NE[0], layout).unsqueeze(0)
        normed_ND = rms_norm(x_ND, *self.norm_in)
        q_NHE, k_NGE, v_NGE = self._heads(self.qkv.forward(normed_ND))
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            q_NHE, k_NGE = rms_norm(q_NHE, *q_norm), rms_norm(k_NGE, *k_norm)
        rotary(q_NHE, k_NGE, cos_1NE[0], sin_1NE[0])
        pages = self._holder[0]
        out_NHE = attention(
            q_NHE,
            k_NGE,
            v_NGE,
            pages.dspark_keys,
            pages.dspark_values,
            block_tables_RP,
            query_starts_R1,
            visible_N,
            positions_N,
            slots_N,
            max_visible=block_tables_RP.shape[1] * pages.dspark_keys.shape[2],
            scale=self.scale,
            window=self.window,
        )
        x_ND = x_ND + self.o_proj.forward(out_NHE.flatten(1))
        gate_up_NF = self.gate_up.forward(rms_norm(x_ND, *self.norm_mid))
        out_ND: Tensor = x_ND + self.down_proj.forward(silu_mul(gate_up_NF))
        return out_ND.unsqueeze(0)

    def _heads(self, qkv_NF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads_NHE = qkv_NF.view(len(qkv_NF), -1, self.head_dim)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q_NHE, k_NGE, v_NGE = torch.split(heads_NHE, sizes, dim=1)
        return q_NHE, k_NGE, v_NGE


def fuse_layer(
    layer: Any,
    *,
    window: int | None,
    inputs: Sequence[Any],
    arguments: dict[str, Any],
    expected: Tensor,
) -> bool:
    """Replace the layer's forward pass if the pattern fits; whether it did.

    `inputs` and `arguments` are those of a call to the layer, `expected` is what it returned.
    The layer's own projections are dropped when it is replaced.
    """
    if not _has_pattern(layer):
        return False
    fused = FusedLayer(layer, window=window)
    if not _is_near(fused.forward(*inputs, **arguments), expected):
        return False
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        delattr(layer.self_attn, name)
    del layer.mlp
    layer.fused = fused
    layer.forward = fused.forward
    return True


def fuse_norm(norm: nn.Module | None, x: Tensor, expected: Tensor) -> bool:
    """Replace a norm's forward pass by `rms_norm` if it computes that; whether it did."""
    if norm is None or not _is_plain_norm(norm) or expected.dtype not in _TOLERANCE:
        return False
    plain = _norm_of(norm)
    if not _is_near(rms_norm(x, *plain), expected):
        return False
    norm.forward = partial(rms_norm, weight_D=plain.weight, eps=plain.eps)
    return True


def fused_norm(norm: nn.Module | None) -> Norm | None:
    """What `fuse_norm` replaced, `None` of any other module."""
    if norm is None or not isinstance(norm.forward, partial):
        return None
    return _norm_of(norm)


def _is_near(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    return bool(error <= _TOLERANCE[expected.dtype])


def _has_pattern(layer: Any) -> bool:
    attn, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attn is None or mlp is None:
        return False
    linears = [
        *(getattr(attn, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")),
    ]
    norms = [getattr(layer, n, None) for n in ("input_layernorm", "post_attention_layernorm")]
    norms += [getattr(attn, n) for n in ("q_norm", "k_norm") if hasattr(attn, n)]
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and all(_is_plain_norm(norm) for norm in norms)
        and attn.q_proj.weight.dtype in _TOLERANCE
        and not any(True for _ in _unknown_children(layer, attn, mlp))
    )


def _unknown_children(layer: nn.Module, attn: nn.Module, mlp: nn.Module) -> Sequence[str]:
    known = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    known_attn = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    known_mlp = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    return [
        *(name for name, _ in layer.named_children() if name not in known),
        *(name for name, _ in attn.named_children() if name not in known_attn),
        *(name for name, _ in mlp.named_children() if name not in known_mlp),
    ]


def _is_plain_norm(norm: nn.Module | None) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1 and _eps(norm) is not None


def _eps(norm: nn.Module | None) -> float | None:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _norm_of(norm: nn.Module) -> Norm:
    eps = _eps(norm)
    assert eps is not None
    assert isinstance(norm.weight, Tensor)
    return Norm(norm.weight, float(eps))
