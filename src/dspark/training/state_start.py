"""A block drafter's backbone that starts from least squares instead of noise.

What the target's last hidden state will be a few tokens on is partly linear in its taps before
the anchor and in the anchor's embedding. A small budget spends most of its steps on finding that;
sums over some steps' batches give it at once. The taps are projected to what predicts best, heads
look at the last tokens of the context, and every output matrix is fitted to what those before it
have left, all slots together. Nothing of the drafter's form changes, so serving sees weights only.

Letters: legend in core.py; T context rows, N supervised slots, M taps, X slots of all blocks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dspark.algorithms.regression import Moments, predictive_view, reflection, ridge
from dspark.models.drafter import Drafter, DrafterAttention, DrafterLayer
from dspark.models.heads import SequentialKind
from dspark.training.block_attention import block_attention
from dspark.training.ranks import Ranks
from dspark.training.slot_pass import Batch

SLOTS_PER_UNIT = 32
"""Supervised slots for each hidden unit of a layer: fewer are learnt by heart."""
_TAP_SHARE, _ATTENTION_SHARE, _UNIT_SHARE, _CONSTANT_SHARE = 0.03, 0.03, 0.1, 0.01
"""Penalties of the regressions, as shares of their features' mean square."""
_KERNELS = ((1.0, 4), (2.5, 6), (4.5, 7))
"""How far before a slot a head looks, and with how many of the fastest rotations: the more, the
wider. The heads of a group take them in turn, so that each slot has one at the last tap."""
_SHARPNESS = 1.15
"""Root mean square of normed queries and keys."""
_FIRST_SHRINKAGE = 0.1
"""The first of several layers adds little context, for its units to see the anchor beside it."""
_SLOT_DECAY = 4.0
"""Weights of slots fall as in the loss (Eq. 9-11)."""
_GATE = 2.0
"""What the gate of a unit that is to be linear stands at."""


@dataclass(slots=True)
class _Rows:
    """One batch on its way through the layers."""

    batch: Batch
    ctx_TD: Tensor
    x_XD: Tensor
    cos_X1E: Tensor
    sin_X1E: Tensor
    wanted_ND: Tensor
    weight_N: Tensor

    @property
    def left_ND(self) -> Tensor:
        """What is still to be predicted."""
        return self.wanted_ND - self.x_XD[self.batch.rows_N]


@torch.no_grad()
def start_from_states(
    drafter: Drafter, batches: Iterable[Sequence[Batch]], *, scale: float = 1.0, ranks: Ranks
) -> None:
    """Fit `fc`, the layers and the final norm of a new drafter to states in some steps' `batches`.

    `scale`: the factor between the target's LM head products and its logits. `fc` is for taps as
    they are. The same batches give the same weights, on every rank; a sequential head
    that is there already is reckoned with. Takes as many steps as `SLOTS_PER_UNIT` asks for.
    """
    dtype = drafter.dtype
    drafter.float()
    taken = _enough(batches, drafter, ranks)
    pairs = _pair_image(drafter)
    wanted = [b.last_ND.float() * scale - pairs(b.previous_AK.flatten()[b.rows_N]) for b in taken]
    constant_D = _fit_taps(drafter, taken, wanted, ranks)
    rows = [_entering(drafter, *each) for each in zip(taken, wanted, strict=True)]
    num_layers = len(drafter.decoder_layers())
    for index, layer in enumerate(drafter.decoder_layers()):
        factor = _FIRST_SHRINKAGE if index == 0 and num_layers > 1 else 1.0
        _fit_attention(drafter, layer, rows, constant_D, factor=factor, ranks=ranks)
        _fit_units(layer, rows, ranks)
    gain = torch.zeros(2)
    for part in rows:
        normed_ND = drafter.norm(part.x_XD[part.batch.rows_N])
        gain[0] += (normed_ND * part.wanted_ND * part.weight_N[:, None]).sum().cpu()
        gain[1] += (normed_ND.square() * part.weight_N[:, None]).sum().cpu()
    ranks.sum_all([gain])
    drafter.norm.weight.fill_(float(gain[0] / gain[1]))
    drafter.to(dtype)


def _enough(batches: Iterable[Sequence[Batch]], drafter: Drafter, ranks: Ranks) -> list[Batch]:
    """Batches of as many steps as the largest regression needs, the same steps on every rank."""
    needed = SLOTS_PER_UNIT * drafter.config.intermediate_size
    taken: list[Batch] = []
    count = torch.zeros(())
    for step in batches:
        taken += step
        more = torch.tensor(float(sum(len(batch.rows_N) for batch in step)))
        ranks.sum_all([more])
        count += more
        if float(count) >= needed:
            break
    return taken


def _pair_image(drafter: Drafter) -> Callable[[Tensor], Tensor]:
    """What the sequential head's bias is worth as a hidden state, by the token before a slot."""
    head = drafter.markov_head
    if head is None:
        return lambda ids_N: torch.zeros(
            len(ids_N), drafter.config.hidden_size, device=ids_N.device
        )
    rows_SD = drafter.head_weight_SD.float()
    w2_Sr = head.markov_w2.weight
    gate = 0.5 if head.kind is SequentialKind.GATED else 1.0
    image_Dr = ridge(rows_SD.T @ rows_SD, rows_SD.T @ w2_Sr, share=1e-3) * gate
    return lambda ids_N: head.embed(ids_N) @ image_Dr.T


def _fit_taps(
    drafter: Drafter, batches: Sequence[Batch], wanted: Sequence[Tensor], ranks: Ranks
) -> Tensor:
    """`fc` to the view of the taps that predicts best; the direction [D] of its constant.

    Features are the taps one before a slot's position and the embedding of the token at it.
    """
    config = drafter.config
    size, num_taps = config.hidden_size, config.taps_size
    squares_M = torch.stack([b.taps_TM.float().square().sum(dim=0) for b in batches]).sum(dim=0)
    num_rows = torch.tensor(float(sum(len(b.taps_TM) for b in batches)), device=squares_M.device)
    ranks.sum_all([squares_M, num_rows])
    spread_M = (squares_M / num_rows).clamp(min=1e-6).sqrt()
    moments = Moments.empty(num_taps + size, size, device=spread_M.device)
    tokens = Moments.empty(size, 1, device=spread_M.device)
    loud = drafter.embed_weight_VD[:1024].float().square().mean().rsqrt()
    for batch, wanted_ND in zip(batches, wanted, strict=True):
        at_N, is_there_N = _taps_before(batch)
        token_ND = functional.embedding(
            batch.previous_AK.flatten()[batch.rows_N], drafter.embed_weight_VD
        ).float()
        taps_NM = batch.taps_TM[at_N[is_there_N]].float() / spread_M
        x_NF = torch.cat((taps_NM, token_ND[is_there_N] * loud), dim=1)
        moments.add(x_NF, wanted_ND[is_there_N])
        normed_ND = functional.rms_norm(token_ND, (size,))
        tokens.add(normed_ND, torch.ones_like(normed_ND[:, :1]))
    ranks.sum_all([*moments.parts(), *tokens.parts()])
    count = moments.num_rows
    gram_FF, cross_FY = moments.gram_FF / count, moments.cross_FY / count
    weights_MD = ridge(gram_FF, cross_FY, share=_TAP_SHARE)[:num_taps]
    gram_MM = gram_FF[:num_taps, :num_taps]
    view_DM = predictive_view(
        gram_MM,
        gram_MM @ weights_MD,  # what the taps predict beside the tokens
        moments.sum_F[:num_taps] / count,
        size=size,
        share=_TAP_SHARE,
    )
    # Slots push away from the constant of the context: a key that slots share with it would
    # be nearer than any of its rows.
    own_D = ridge(tokens.gram_FF, tokens.cross_FY, share=_CONSTANT_SHARE)[:, 0]
    constant_D: Tensor = -own_D / own_D.norm()
    drafter.fc.weight.copy_(reflection(constant_D) @ view_DM / spread_M)
    return constant_D


def _taps_before(batch: Batch) -> tuple[Tensor, Tensor]:
    """The context row one before each supervised slot's position, and whether it is there."""
    blocks, size = batch.blocks, batch.blocks.block_size
    lengths = torch.tensor(blocks.context_lengths, device=blocks.anchors_A.device)
    counts = torch.tensor(blocks.num_blocks, device=lengths.device)
    starts_A = (lengths.cumsum(0) - lengths).repeat_interleave(counts)
    lengths_A = lengths.repeat_interleave(counts)
    block_N, slot_N = batch.rows_N // size, batch.rows_N % size
    place_N = blocks.anchors_A[block_N] + slot_N - 1
    is_there_N = (place_N >= 0) & (place_N < lengths_A[block_N])
    return starts_A[block_N] + place_N, is_there_N


def _entering(drafter: Drafter, batch: Batch, wanted_ND: Tensor) -> _Rows:
    cos_X1E, sin_X1E = drafter.rotary.angles(batch.blocks.positions_N)
    slot_N = batch.rows_N % batch.blocks.block_size
    return _Rows(
        batch=batch,
        ctx_TD=drafter.context(batch.taps_TM),
        x_XD=drafter.block_inputs(batch.previous_AK[:, 0]),
        cos_X1E=cos_X1E,
        sin_X1E=sin_X1E,
        wanted_ND=wanted_ND,
        weight_N=torch.exp(-slot_N / _SLOT_DECAY),
    )


def _fit_attention(
    drafter: Drafter,
    layer: DrafterLayer,
    rows: Sequence[_Rows],
    constant_D: Tensor,
    *,
    factor: float,
    ranks: Ranks,
) -> None:
    """Heads that look at the last tokens of the context; what they read is fitted to the rest."""
    config, attention = drafter.config, layer.self_attn
    slots_D = _shared_constant(
        [layer.input_layernorm(r.x_XD[r.batch.rows_N]) for r in rows],
        [r.weight_N for r in rows],
        ranks,
    )
    _look_back(drafter, attention, slots_D=slots_D, context_D=constant_D)
    values_SD = reflection(constant_D)[:, : config.num_key_value_heads * config.head_dim].T
    attention.v_proj.weight[: len(values_SD)] = values_SD
    read = [_read(drafter, layer, part) for part in rows]
    num_read = config.num_attention_heads * config.head_dim
    moments = Moments.empty(num_read, config.hidden_size, device=constant_D.device)
    for part, read_XF in zip(rows, read, strict=True):
        moments.add(read_XF[part.batch.rows_N], part.left_ND, part.weight_N)
    ranks.sum_all(moments.parts())
    weights_FD = ridge(moments.gram_FF, moments.cross_FY, share=_ATTENTION_SHARE)
    attention.o_proj.weight.copy_(weights_FD.T * factor)
    for part, read_XF in zip(rows, read, strict=True):
        part.x_XD = part.x_XD + attention.o_proj(read_XF)


def _look_back(
    drafter: Drafter, attention: DrafterAttention, *, slots_D: Tensor, context_D: Tensor
) -> None:
    """Queries and keys that are the same for every token: scores depend on the distance alone.

    A sum of cos(frequency * (distance - offset)) is largest at the offset; noise stays beside it.
    """
    config = drafter.config
    frequency_P = drafter.rotary.inverse_frequency
    width, half = config.head_dim, len(frequency_P)
    size = math.sqrt(width) * _SHARPNESS
    share = config.num_attention_heads // config.num_key_value_heads
    fastest_P = frequency_P.argsort(descending=True).argsort()
    widest = max(count for _, count in _KERNELS)
    key_P = functional.normalize((fastest_P < widest).float(), dim=0)
    key_E = torch.cat((key_P, torch.zeros_like(key_P)))
    for head in range(config.num_attention_heads):
        offset, count = _KERNELS[head % share % len(_KERNELS)]
        ray_P = functional.normalize((fastest_P < count).float(), dim=0)
        angle_P = -frequency_P * offset
        query_E = torch.cat((ray_P * angle_P.cos(), ray_P * angle_P.sin()))
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] += torch.outer(query_E * size, slots_D)
    for group in range(config.num_key_value_heads):
        rows = slice(group * width, (group + 1) * width)
        attention.k_proj.weight[rows] += torch.outer(key_E * size, context_D)
    assert 2 * half == width, "rotations are of pairs"
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            norm.weight.fill_(_SHARPNESS)


def _read(drafter: Drafter, layer: DrafterLayer, part: _Rows) -> Tensor:
    """What the heads of all slots read, [X, H * E]: what `o_proj` is applied to."""
    blocks = part.batch.blocks
    angles = drafter.rotary.angles(blocks.context_positions_T)
    context_kv = [layer.self_attn.keys_values(part.ctx_TD, *angles)]
    attend = block_attention(
        context_kv, blocks, windows=[drafter.config.windows[layer.self_attn.index]]
    )
    found: list[Tensor] = []

    def kept(_layer: int, q_XHE: Tensor, k_XGE: Tensor, v_XGE: Tensor) -> Tensor:
        found.append(attend(0, q_XHE, k_XGE, v_XGE))
        return found[0]

    layer.self_attn(layer.input_layernorm(part.x_XD), part.cos_X1E, part.sin_X1E, kept)
    return found[0].flatten(1)


def _fit_units(layer: DrafterLayer, rows: Sequence[_Rows], ranks: Ranks) -> None:
    """Half of the units with a gate that stands open, so linear ones; all fitted to the rest."""
    mlp = layer.mlp
    normed = [layer.post_attention_layernorm(r.x_XD[r.batch.rows_N]) for r in rows]
    open_D = _shared_constant(normed, [r.weight_N for r in rows], ranks)
    num_units, size = mlp.gate_proj.weight.shape
    mlp.gate_proj.weight *= _lively(mlp.gate_proj.weight, size)
    mlp.up_proj.weight *= _lively(mlp.up_proj.weight, size)
    mlp.gate_proj.weight[: num_units // 2] *= 0.3
    mlp.gate_proj.weight[: num_units // 2] += _GATE * open_D
    moments = Moments.empty(num_units, size, device=open_D.device)
    for part, normed_ND in zip(rows, normed, strict=True):
        unit_NF = functional.silu(mlp.gate_proj(normed_ND)) * mlp.up_proj(normed_ND)
        moments.add(unit_NF, part.left_ND, part.weight_N)
    ranks.sum_all(moments.parts())
    weights_FD = ridge(moments.gram_FF, moments.cross_FY, share=_UNIT_SHARE)
    mlp.down_proj.weight.copy_(weights_FD.T)
    for part in rows:
        part.x_XD = part.x_XD + mlp(layer.post_attention_layernorm(part.x_XD))


def _lively(weight_FD: Tensor, size: int) -> Tensor:
    """The factor to products of a size near 1.2 with normed rows."""
    return 1.2 / math.sqrt(size) / weight_FD.square().mean().sqrt()


def _shared_constant(normed: Sequence[Tensor], weights: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Weights [D] whose product with normed slots is nearly 1, over all ranks."""
    moments = Moments.empty(normed[0].shape[1], 1, device=normed[0].device)
    for rows_ND, weight_N in zip(normed, weights, strict=True):
        moments.add(rows_ND, torch.ones_like(rows_ND[:, :1]), weight_N)
    ranks.sum_all(moments.parts())
    return ridge(moments.gram_FF, moments.cross_FY, share=_CONSTANT_SHARE)[:, 0]
