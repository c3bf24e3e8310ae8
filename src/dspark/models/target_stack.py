"""A target whose layers are all fused runs them as one call. It knows the parts of such a model.

The call has the bits of the layers run one by one, which a probe text confirms before it is used;
any other model keeps running layer by layer.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dspark.core import AttentionLayout
from dspark.kernels.linear import PackedLinear
from dspark.kernels.rounds import RoundTable
from dspark.kernels.stack import FusedStack, StackOutput, StackPages, StackVerdict
from dspark.models.attention import KVPages
from dspark.models.fusion import FusedLayer, fused_norm
from dspark.models.rotary import RotaryTables

_STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
"""Those whose angles depend on the position alone, not on the length of the text."""


class TargetStack:
    """The layers, the final norm and a packed head; the embedding stays with the model."""

    def __init__(self, stack: FusedStack, tables: RotaryTables) -> None:
        self._stack = stack
        self._tables = tables
        self._bound: WeakKeyDictionary[KVPages, StackPages] = WeakKeyDictionary()
        self._last: tuple[ref[KVPages], StackPages] | None = None

    @classmethod
    def of(
        cls,
        base: nn.Module,
        layers: Sequence[nn.Module],
        head: nn.Module,
        embedding: nn.Module,
        *,
        head_divisors_D: Tensor | None = None,
    ) -> "TargetStack | None":
        """The stack of a model whose parts all fit, else `None`. A head may be left out.

        `head_divisors_D`: what the head's inputs are divided by (see `smoothing`).
        """
        fused = [getattr(layer, "fused", None) for layer in layers]
        norm = fused_norm(getattr(base, "norm", None))
        rotary = getattr(base, "rotary_emb", None)
        if norm is None or getattr(rotary, "rope_type", None) not in _STATIC_ROPE_TYPES:
            return None
        if not all(isinstance(layer, FusedLayer) and layer.is_joined for layer in fused):
            return None
        stack = FusedStack(
            [layer.stack_layer() for layer in fused if layer],
            final_norm=norm,
            head=head if isinstance(head, PackedLinear) and head.is_compiled else None,
            head_divisors_D=head_divisors_D,
            embedding_VD=_plain_rows(embedding),
        )
        return cls(stack, RotaryTables(_angles_of(rotary, like=norm.weight)))

    @property
    def has_head(self) -> bool:
        """Whether it can give logits."""
        return self._stack.has_head

    @property
    def has_embedding(self) -> bool:
        """Whether `run` takes ids."""
        return self._stack.has_embedding

    def run(
        self,
        x: Tensor,
        *,
        layout: AttentionLayout,
        pages: KVPages,
        tap_layers: Sequence[int],
        has_logits: bool = False,
    ) -> StackOutput:
        """Ids or embedded tokens to the last hidden states, the taps, and what the head makes."""
        cos_PE, sin_PE = self._tables.up_to(layout.max_visible)
        return self._stack.run(
            x,
            cos_PE=cos_PE,
            sin_PE=sin_PE,
            pages=self._pages(pages),
            layout=layout,
            taps=tap_layers,
            has_logits=has_logits,
        )

    def decode(
        self,
        ids: list[int],
        runs: Sequence[tuple[int, int, int]],
        *,
        table: Tensor,
        pages: KVPages,
        tap_layers: Sequence[int],
        rounds: RoundTable,
        has_states: bool,
        **drafts: Any,
    ) -> StackVerdict:
        """`FusedStack.decode`, which names the drafts, over the target's own pages."""
        cos_PE, sin_PE = self._tables.up_to(max(start + count for _, start, count in runs))
        return self._stack.decode(
            ids,
            runs,
            rounds=rounds,
            cos_PE=cos_PE,
            sin_PE=sin_PE,
            pages=self._pages(pages),
            table=table,
            taps=tap_layers,
            has_states=has_states,
            **drafts,
        )

    def _pages(self, pages: KVPages) -> StackPages:
        if self._last is None or self._last[0]() is not pages:
            bound = self._bound.get(pages)
            if bound is None:
                bound = self._bound[pages] = self._stack.bind(pages.keys, pages.values)
            self._last = (ref(pages), bound)
        return self._last[1]


def _plain_rows(embedding: nn.Module) -> Tensor | None:
    """The rows of an embedding that only looks them up; others scale them, for instance."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    return embedding.weight if embedding.weight.is_contiguous() else None


def _angles_of(rotary: Any, *, like: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """cos and sin [N, E] of positions [N], by the model's own module and in its dtype."""

    def angles(positions_N: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cos_1NE, sin_1NE = rotary(like, positions_N[None])
        return cos_1NE[0], sin_1NE[0]

    return angles
