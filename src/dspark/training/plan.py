"""What a training will need, told before it starts: parameters, bytes on the disk, memory, time.

Counts and sizes are exact; memory and time are estimates, from the arithmetic of a step and the
measured speed of a large matrix product. It runs nothing else.
"""

import time
from dataclasses import dataclass

import torch

_UTILISATION = 0.4
"""Share of the matrix product's speed that a whole step reached where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of target, drafter and data."""

    target_parameters: int
    """Embedding and LM head included, once if they are tied."""
    layer_parameters: int
    """Of the target's decoder layers alone."""
    drafter_parameters: int
    """Trained ones."""
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    """Of the drafter."""
    num_taps: int
    rank: int
    block_size: int
    dtype_bytes: int
    num_answers: int
    num_tokens: int
    """Prompts and answers."""
    num_answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How it is trained."""

    steps: int | None
    minutes: float | None
    answers_per_step: int
    micro_batches: int
    tokens_per_anchor: float
    chunk_rows: int
    newton_schulz_steps: int
    is_online: bool
    """The target runs in every step; otherwise once over all answers."""
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `dspark train --dry-run`; sizes in bytes."""

    drafter_parameters: int
    drafter_file_bytes: int
    checkpoint_bytes: int
    state_bytes_per_token: int
    """Hidden states of a token: what is cached, or travels."""
    logit_bytes_per_token: int
    """What logits would have cost instead."""
    cache_bytes: int
    peak_memory_bytes: int
    slots_per_step: int
    tera_flops_per_step: float
    steps: int
    epochs: float
    supervised_tokens: int
    machine_tera_flops: float
    hours: float


def plan(
    sizes: Sizes, how: Schedule, *, bytes_per_token: int, cache_bytes: int, tera_flops: float
) -> Plan:
    """Work out a training on a machine of that speed (in 10^12 operations a second)."""
    share = how.answers_per_step / max(sizes.num_answers, 1)
    context, answered = sizes.num_tokens * share, sizes.num_answer_tokens * share
    slots = answered / how.tokens_per_anchor * sizes.block_size
    per_step = _step_flops(sizes, how, slots=slots, context=context) / how.num_ranks
    speed = tera_flops * 1e12 * _UTILISATION
    once = 0.0 if how.is_online else 2.0 * sizes.layer_parameters * sizes.num_tokens
    steps = how.steps
    if steps is None:
        assert how.minutes is not None
        steps = max(1, int(how.minutes * 60.0 * speed / per_step))
    return Plan(
        drafter_parameters=sizes.drafter_parameters,
        drafter_file_bytes=sizes.drafter_parameters * sizes.dtype_bytes,
        checkpoint_bytes=sizes.drafter_parameters * 16,
        state_bytes_per_token=bytes_per_token,
        logit_bytes_per_token=2 * sizes.vocab_size,
        cache_bytes=cache_bytes,
        peak_memory_bytes=round(_memory(sizes, how, slots=slots, context=context)),
        slots_per_step=round(slots),
        tera_flops_per_step=per_step / 1e12,
        steps=steps,
        epochs=steps * share,
        supervised_tokens=round(steps * slots),
        machine_tera_flops=tera_flops,
        hours=(steps * per_step + once) / speed / 3600.0,
    )


def measured_tera_flops(*, device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Speed of a large matrix product here, in 10^12 operations a second."""
    size = 4096 if device.type == "cuda" else 1024
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones_like(left)
    (left @ right).sum().item()
    count, start = 0, time.monotonic()
    while time.monotonic() - start < seconds:
        (left @ right)[0, 0].item()
        count += 1
    return 2.0 * size**3 * count / (time.monotonic() - start) / 1e12


def _step_flops(sizes: Sizes, how: Schedule, *, slots: float, context: float) -> float:
    """A step's multiplications and additions; a backward pass costs two forward ones."""
    width, draft = sizes.hidden_size, sizes.draft_vocab_size
    target = 0.0
    if how.is_online:
        target = 2.0 * sizes.layer_parameters * context + 2.0 * sizes.vocab_size * width * slots
    of_context = sizes.num_taps * width * width + sizes.num_layers * width * width
    backbone = 6.0 * (sizes.drafter_parameters * slots + of_context * context)
    head = 6.0 * draft * width * slots + 6.0 * draft * sizes.rank * slots
    shape = (width, max(sizes.intermediate_size, width))
    muon = 5.0 * sizes.num_layers * how.newton_schulz_steps * 4.0 * shape[0] ** 2 * shape[1]
    return target + backbone + head + muon


def _memory(sizes: Sizes, how: Schedule, *, slots: float, context: float) -> float:
    """Weights, optimiser, and the activations of one micro-batch."""
    part = 1.0 / how.micro_batches
    slots, context, width = slots * part, context * part, sizes.hidden_size
    weights = sizes.target_parameters * sizes.dtype_bytes
    # parameter, gradient in its type and in float32, master and two moments
    optimiser = sizes.drafter_parameters * (2 * sizes.dtype_bytes + 4 + 12) / how.num_ranks
    taps = 2.0 * context * (sizes.num_taps + 1) * width * sizes.dtype_bytes
    per_slot = 14 * width + 4 * sizes.intermediate_size
    length = sizes.num_tokens / max(sizes.num_answers, 1)
    scores = 3.0 * slots * sizes.num_heads * length
    layers = sizes.num_layers * (slots * per_slot + context * 4 * width + scores)
    chunk = how.chunk_rows * sizes.draft_vocab_size * (2 * sizes.dtype_bytes + 6 * 4)
    heads = sizes.draft_vocab_size * (width + sizes.rank) * sizes.dtype_bytes
    return weights + optimiser + taps + layers * sizes.dtype_bytes + chunk + heads
