"""All decoder layers of a model as one call: `FusedStack`. CPU and C++ path only.

It knows the pattern x += o(attention(rotary(heads(norm(x))))); x += down(silu(gate) * up), where
gate and up are one product of norm(x); no model by name, and no request. One parallel region
serves the whole pass: a layer is a dozen pieces of work of a few microseconds each, less than a
call of an operator costs. Its bits are those of the operators called one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.core import AttentionLayout
from dspark.kernels.linear import PackedLinear
from dspark.kernels.rounds import RoundTable

_NUM_STATES = 8  # tensors that a step leaves behind


class Norm(NamedTuple):
    """A root-mean-square norm, the weight in the model's dtype."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One decoder layer; `heads` give q, k and v of all heads side by side, in that order."""

    norm_in: Norm
    norm_mid: Norm
    head_norms: tuple[Norm, Norm] | None
    """Of each q and of each k head, before the rotation."""
    heads: Sequence[PackedLinear]
    """One product or two, whose outputs lie one after the other."""
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    head_dim: int
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int | None

    @property
    def is_compiled(self) -> bool:
        """Whether every product has a C++ form."""
        products = [*self.heads, self.out, self.gate_up, self.down]
        return all(isinstance(p, PackedLinear) and p.is_compiled for p in products)


class StackOutput(NamedTuple):
    """What a pass through all layers gives."""

    hidden_ND: Tensor
    """After the final norm."""
    taps_NM: Tensor
    logits_NV: Tensor | None


class StackStates(NamedTuple):
    """What a pass leaves behind for a drafter; row n is flattened token n."""

    ids_N: Tensor
    hidden_ND: Tensor
    taps_NM: Tensor
    layout: AttentionLayout


class StackVerdict(NamedTuple):
    """What a step from ids to the next tokens gives.

    `logits_NV` is there only if a row that had to be looked at has no finite largest logit; the
    verdict is then void.
    """

    num_accepted: list[int]
    next_tokens: list[int]
    states: StackStates | None
    logits_NV: Tensor | None


class StackPages(NamedTuple):
    """Keys and values of a stack's layers as its calls take them, checked once."""

    bound: Any


class FusedStack:
    """The layers' weights, in use as they lie; scratch memory is kept from call to call."""

    def __init__(
        self,
        layers: Sequence[StackLayer],
        *,
        final_norm: Norm | None,
        head: PackedLinear | None = None,
        head_divisors_D: Tensor | None = None,
        embedding_VD: Tensor | None = None,
    ) -> None:
        """Every layer must be `is_compiled`, and so must the head, whose input is the result.

        `head_divisors_D`: the result is divided by them before it meets an int8 head. Raises
        `RuntimeError` for a head of other weights. `embedding_VD`: its rows may be asked for by id.
        """
        norms: list[Norm | None] = []
        products: list[PackedLinear | None] = []
        for layer in layers:
            norms += [layer.norm_in, layer.norm_mid, *(layer.head_norms or (None, None))]
            products += [*layer.heads, *([None] * (2 - len(layer.heads)))]
            products += [layer.out, layer.gate_up, layer.down]
        sizes = [(x.head_dim, x.num_heads, x.num_kv_heads, x.window or 0) for x in layers]
        self._stack = torch.classes.dspark.Stack(
            [None if norm is None else norm.weight.detach() for norm in norms],
            [0.0 if norm is None else norm.eps for norm in norms],
            [part for product in products for part in _parts(product)],
            [0 if product is None else product.out_features for product in products],
            [size for layer in sizes for size in layer],
            [layer.scale for layer in layers],
            None if final_norm is None else final_norm.weight.detach(),
            0.0 if final_norm is None else final_norm.eps,
            [] if head is None else list(_parts(head)),
            0 if head is None else head.out_features,
            None if head is None else head_divisors_D,
            None if embedding_VD is None else embedding_VD.detach(),
        )
        self._forward, self._decode = self._stack.forward, self._stack.decode
        self.has_embedding = embedding_VD is not None
        self.has_head = head is not None

    def bind(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> StackPages:
        """Pages [num_pages, G, page_size, E] of each layer, for `run`; they stay in use. Or int8
        ones, see `kernels.byte_pages`.

        Raises `RuntimeError` for pages that do not fit the layers.
        """
        return StackPages(self._stack.bind(list(keys), list(values)))

    def run(
        self,
        x: Tensor,
        *,
        cos_PE: Tensor,
        sin_PE: Tensor,
        pages: StackPages,
        layout: AttentionLayout,
        taps: Sequence[int] = (),
        has_logits: bool = False,
    ) -> StackOutput:
        """Hidden states [N, D], tapped layer outputs [N, taps * D], and logits [N, V] if wanted.

        `x`: embedded tokens [N, D], or ids [N] of a stack with an embedding. `cos_PE`, `sin_PE`:
        rotary tables by position. `pages` come from `bind`; the tokens' keys and values are written
        into them. `taps`: numbers of layers, -1 for the embedded tokens. Raises `RuntimeError` if
        logits are wanted of a stack without a head, or ids given to one without an embedding.
        """
        hidden_ND, taps_NM, logits_NV = self._forward(
            x,
            cos_PE,
            sin_PE,
            pages.bound,
            layout.block_tables_RP,
            layout.query_starts_R1,
            layout.visible_N,
            layout.positions_N,
            layout.slots_N,
            list(taps),
            has_logits,
        )
        return StackOutput(hidden_ND, taps_NM, logits_NV if has_logits else None)

    def decode(
        self,
        ids: list[int],
        runs: Sequence[tuple[int, int, int]],
        *,
        rounds: RoundTable,
        cos_PE: Tensor,
        sin_PE: Tensor,
        pages: StackPages,
        table: Tensor,
        taps: Sequence[int] = (),
        draft_tokens_RK: Tensor | None = None,
        draft_probs_RKS: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
        has_states: bool = False,
        forbidden: Sequence[int] = (),
    ) -> StackVerdict:
        """A step as one call: layout, `run` and `kernels.decision.decide` together.

        Its requests are those that `decide` can judge. `runs`: row of `table` (pages of all slots,
        int32), first position and number of tokens of each request, its anchor and the drafted
        tokens that are verified; `ids` are those tokens. The rest is as in `run` and `decide`.
        Needs an embedding and a head. `forbidden`: flattened tokens and target ids in turn, the
        tokens in order; such an id has a logit of minus infinity.
        """
        states, num_accepted, next_tokens = self._decode(
            ids,
            [number for run in runs for number in run],
            table,
            cos_PE,
            sin_PE,
            pages.bound,
            list(taps),
            rounds.flat_counters,
            rounds.flat_options,
            None if draft_tokens_RK is None else draft_tokens_RK.contiguous(),
            draft_probs_RKS,
            None if vocabulary is None else vocabulary.column_V,
            has_states,
            forbidden,
        )
        logits_NV = states.pop() if len(states) % _NUM_STATES == 1 else None
        left = None
        if has_states:
            ids_N, hidden_ND, taps_NM, tables_RP, starts_R1, visible_N, positions_N, slots_N = (
                states
            )
            layout = AttentionLayout(
                block_tables_RP=tables_RP,
                query_starts_R1=starts_R1,
                visible_N=visible_N,
                positions_N=positions_N,
                slots_N=slots_N,
                max_visible=max(start + count for _, start, count in runs),
            )
            left = StackStates(ids_N, hidden_ND, taps_NM, layout)
        return StackVerdict(num_accepted, next_tokens, left, logits_NV)


def _parts(product: PackedLinear | None) -> tuple[Tensor | None, ...]:
    if product is None:
        return (None, None, None, None)
    return (product.packed, product.bias, product.scales_O, product.sums_O)
