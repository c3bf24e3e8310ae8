"""`dspark train --dry-run`: what a training will need, from the target's configuration alone.

No weight is read, so a directory with a config.json is enough. It joins shapes and the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.core import resolve_dtype
from dspark.data.answers import Answer
from dspark.data.states_cache import CacheFormat
from dspark.drafter_shape import drafter_config
from dspark.errors import InputError, ModelError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.kinds import drafter_of
from dspark.models.target_source import resolve_source
from dspark.recipes import Recipe
from dspark.training.plan import Plan, Schedule, Sizes, measured_tera_flops, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much text there is, or will be."""

    num_answers: int
    prompt_tokens: float
    """Mean of an answer's prompt."""
    answer_tokens: float
    """Mean of an answer."""

    def __post_init__(self) -> None:
        for name in ("num_answers", "prompt_tokens", "answer_tokens"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be above 0.")

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Amount":
        """Of answers that are there. Raises `InputError` if there is none."""
        if not answers:
            raise InputError("There is no answer to plan with; give an answers file or amounts.")
        count = len(answers)
        return cls(
            num_answers=count,
            prompt_tokens=sum(len(a.prompt_token_ids) for a in answers) / count,
            answer_tokens=sum(len(a.token_ids) for a in answers) / count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A target without weights."""

    spec: _Spec
    text_config: Mapping[str, Any]
    num_parameters: int
    num_layer_parameters: int


def dry_run(
    target: str,
    *,
    recipe: Recipe,
    amount: Amount,
    steps: int | None,
    minutes: float | None,
    states: str,
    cache_dtype: str,
    dtype: str | None,
    tera_flops: float | None,
    num_ranks: int = 1,
) -> Plan:
    """Sizes, memory and time of this training; `tera_flops` `None` measures this machine."""
    if (steps is None) == (minutes is None):
        raise InputError(f"steps is {steps!r} and minutes is {minutes!r}; give exactly one.")
    shape = _shape(target)
    config = drafter_config(shape, None, recipe)
    torch_dtype = resolve_dtype("auto" if dtype is None else dtype)
    taps = recipe.taps(shape.spec.num_layers)
    format = CacheFormat(
        target="",
        target_dtype="",
        template="",
        tokenizer="",
        tap_layers=taps,
        tap_size=len(taps) * shape.spec.hidden_size,
        hidden_size=shape.spec.hidden_size,
        vocab_size=shape.spec.vocab_size,
        dtype=cache_dtype,
    )
    num_tokens = round(amount.num_answers * (amount.prompt_tokens + amount.answer_tokens))
    cache_bytes = format.predicted_bytes(num_tokens=num_tokens, num_answers=amount.num_answers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return plan(
        _sizes(shape, config, amount, num_tokens, torch_dtype.itemsize),
        Schedule(
            steps=steps,
            minutes=minutes,
            answers_per_step=recipe.answers_per_step,
            micro_batches=recipe.micro_batches,
            tokens_per_anchor=recipe.tokens_per_anchor,
            chunk_rows=recipe.objective.chunk_rows,
            newton_schulz_steps=recipe.optimizer.newton_schulz_steps,
            is_online=states != "cache",
            num_ranks=num_ranks,
        ),
        bytes_per_token=format.bytes_per_token,
        cache_bytes=cache_bytes if states == "cache" else 0,
        tera_flops=measured_tera_flops(device=device, dtype=torch_dtype)
        if tera_flops is None
        else tera_flops,
    )


def describe(found: Plan, *, states: str) -> str:
    """The plan in a few lines."""
    cache = f"{found.cache_bytes / 1e9:,.2f} GB in the cache" if states == "cache" else "no disk"
    return (
        f"drafter        {found.drafter_parameters / 1e6:,.1f} M trained parameters, "
        f"{found.drafter_file_bytes / 1e6:,.1f} MB as a file, "
        f"{found.checkpoint_bytes / 1e6:,.1f} MB a checkpoint\n"
        f"hidden states  {states}: {found.state_bytes_per_token:,} bytes a token "
        f"(logits would be {found.logit_bytes_per_token:,}), {cache}\n"
        f"a step         {found.slots_per_step:,} supervised tokens, "
        f"{found.tera_flops_per_step:,.3f} Tflop\n"
        f"memory         about {found.peak_memory_bytes / 1e9:,.2f} GB at the peak (estimate)\n"
        f"in all         {found.steps:,} steps, {found.epochs:,.2f} epochs, "
        f"{found.supervised_tokens:,} supervised tokens\n"
        f"time           about {found.hours:,.2f} hours at {found.machine_tera_flops:,.2f} Tflop/s "
        "of matrix products (estimate)"
    )


def _shape(target: str) -> _Shape:
    source = resolve_source(target)
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The configuration of target {target} cannot be read: {error}") from error
    text = config.get_text_config().to_dict()
    layers = model.base_model.layers
    eos = text.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    spec = _Spec(
        name=target,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=text["hidden_size"],
        num_layers=len(layers),
        max_positions=int(text.get("max_position_embeddings") or 2048),
        eos_ids=eos_ids,
    )
    return _Shape(
        spec=spec,
        text_config=text,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layer_parameters=sum(p.numel() for p in layers.parameters()),
    )


def _sizes(
    shape: _Shape, config: DrafterConfig, amount: Amount, num_tokens: int, dtype_bytes: int
) -> Sizes:
    empty = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    d2t_S = None
    if config.draft_vocab_size is not None:
        d2t_S = torch.empty(config.draft_vocab_size, dtype=torch.int64, device="meta")
    drafter = drafter_of(config, embed_weight_VD=empty, head_weight_VD=empty, d2t_S=d2t_S)
    return Sizes(
        target_parameters=shape.num_parameters,
        layer_parameters=shape.num_layer_parameters,
        drafter_parameters=sum(p.numel() for p in drafter.parameters()),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.num_draft_tokens,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_layers=config.num_hidden_layers,
        num_taps=len(config.target_layer_ids),
        rank=config.markov_rank,
        block_size=config.block_size,
        dtype_bytes=dtype_bytes,
        num_answers=amount.num_answers,
        num_tokens=num_tokens,
        num_answer_tokens=round(amount.num_answers * amount.answer_tokens),
    )
