"""One run of `dspark train`, from a target and answers to a drafter directory.

It joins target, data, drafter and trainer; the maths of none of them is here.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.data.answers import Answer, AnswerSettings, join_turns, read_answers
from dspark.data.batches import AnswerBatches, BatchConfig
from dspark.data.hidden_states import fill_cache, select_vocabulary
from dspark.errors import InputError
from dspark.models.checkpoint import Provenance, save_drafter, target_fingerprint
from dspark.models.drafter import Drafter, DrafterConfig
from dspark.models.target import Target
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer
from dspark.training.objective import TargetHead
from dspark.training.trainer import StepReport, TrainConfig, Trainer, TrainSummary
from dspark.training.validation import Validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who hears of a run: states computed, steps done, measurements on held-out answers."""

    on_states: Callable[[int, int], None]
    on_step: Callable[[StepReport], None]
    on_validation: Callable[[int, Validation], None]


def read_all_answers(files: Sequence[Path]) -> list[Answer]:
    """The answers of several files, conversations in one piece (`join_turns`).

    Raises `InputError` if an id occurs twice, or for answers made under different conditions.
    """
    answers = [answer for file in files for answer in read_answers(file)]
    conditions_of(answers)
    seen: set[str] = set()
    for answer in answers:
        if answer.id in seen:
            raise InputError(
                f"Answer id {answer.id!r} occurs twice in {', '.join(map(str, files))}; "
                "give each answer its own id."
            )
        seen.add(answer.id)
    return join_turns(answers)


def conditions_of(answers: Sequence[Answer]) -> AnswerSettings | None:
    """How the answers were made, as far as a drafter's user must do the same; `None` if unknown.

    Raises `InputError` if thinking mode, system prompt or template differ among them (UC-102).
    """
    found = {id(a.settings): a.settings for a in answers if a.settings is not None}.values()
    for name in ("thinking", "system", "template_hash"):
        values = {getattr(settings, name) for settings in found}
        if len(values) > 1:
            raise InputError(
                f"These answers were made with different values of {name} "
                f"({', '.join(map(repr, sorted(map(str, values))))}); train on one kind at a time."
            )
    return next(iter(found), None)


def train(
    target: Target,
    tokenizer: Tokenizer,
    answers: Sequence[Answer],
    *,
    recipe: Recipe,
    steps: int | None,
    minutes: float | None,
    out: Path,
    work: Path,
    watchers: Watchers,
    is_compiled: bool = True,
) -> TrainSummary:
    """Train a drafter for `target` and write it to `out`, whole or not at all.

    `work` holds what a run needs to go on after a kill: hidden states and checkpoints. Exactly one
    of `steps` and `minutes` is given.
    """
    config = TrainConfig(
        steps=steps,
        minutes=minutes,
        validate_every=recipe.validate_every,
        checkpoint_every=recipe.checkpoint_every,
        is_compiled=is_compiled,
        objective=recipe.objective,
        optimizer=recipe.optimizer,
    )
    fingerprint = target_fingerprint(target.embed_weight_VD)
    taps = recipe.taps(target.spec.num_layers)
    cache = fill_cache(
        target,
        answers,
        work / "states",
        tap_layers=taps,
        fingerprint=fingerprint,
        on_answer=watchers.on_states,
    )
    batches = AnswerBatches(
        answers,
        source=cache,
        config=BatchConfig(
            block_size=recipe.block_size,
            answers_per_step=recipe.answers_per_step,
            micro_batches=recipe.micro_batches,
            tokens_per_anchor=recipe.tokens_per_anchor,
            num_held_out=recipe.num_held_out,
            seed=recipe.seed,
        ),
    )
    d2t_S = None
    if recipe.draft_vocab_size is not None and recipe.draft_vocab_size < target.spec.vocab_size:
        d2t_S = select_vocabulary(
            cache.mass(), size=recipe.draft_vocab_size, always=target.spec.eos_ids
        )
    drafter = Drafter(
        drafter_config(target, tokenizer, recipe),
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        d2t_S=d2t_S,
        generator=torch.Generator().manual_seed(recipe.seed),
    ).to(target.dtype)
    summary = Trainer(
        drafter,
        batches=batches,
        config=config,
        folder=work,
        target_head=TargetHead(scale=target.head_scale, softcap=target.softcap),
        on_step=watchers.on_step,
        on_validation=watchers.on_validation,
    ).run()
    conditions = conditions_of(answers)
    provenance = Provenance(
        target_name=target.spec.name,
        target_fingerprint=fingerprint,
        target_dtype=str(target.dtype).removeprefix("torch."),
        template_hash=tokenizer.template_hash if tokenizer.has_chat_template else None,
        thinking=None if conditions is None else conditions.thinking,
        system=None if conditions is None else conditions.system,
        recipe={
            **asdict(recipe),
            "answers": None if conditions is None else asdict(conditions),
            "num_answers": len(answers),
            "num_answer_tokens": sum(len(answer.token_ids) for answer in answers),
            **asdict(summary),
        },
    )
    save_drafter(drafter, out, provenance=provenance)
    return summary


def drafter_config(target: Target, tokenizer: Tokenizer, recipe: Recipe) -> DrafterConfig:
    """The sizes of a drafter that fits `target`: its layers are as wide as the target's."""
    text = target.text_config
    num_heads = text["num_attention_heads"]
    size = None
    if recipe.draft_vocab_size is not None and recipe.draft_vocab_size < target.spec.vocab_size:
        size = recipe.draft_vocab_size
    return DrafterConfig(
        vocab_size=target.spec.vocab_size,
        hidden_size=target.spec.hidden_size,
        intermediate_size=text["intermediate_size"],
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=text.get("head_dim") or target.spec.hidden_size // num_heads,
        max_position_embeddings=target.spec.max_positions,
        rope_theta=_rope_theta(text),
        num_target_layers=target.spec.num_layers,
        target_layer_ids=recipe.taps(target.spec.num_layers),
        block_size=recipe.block_size,
        mask_token_id=mask_token_of(target, tokenizer, recipe),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        markov_rank=recipe.markov_rank,
        markov_head_type=recipe.markov_head,
        enable_confidence_head=recipe.has_confidence_head,
        draft_vocab_size=size,
    )


def mask_token_of(target: Target, tokenizer: Tokenizer, recipe: Recipe) -> int:
    """The recipe's mask token, or one that no text and no chat of this target contains.

    Raises `InputError` if there is none to be found.
    """
    if recipe.mask_token_id is not None:
        return recipe.mask_token_id
    if tokenizer.vocab_size < target.spec.vocab_size:
        return tokenizer.vocab_size  # a row of a padded embedding
    taken = {*target.spec.eos_ids, *tokenizer.eos_ids}
    if tokenizer.has_chat_template:
        taken |= set(tokenizer.chat([{"role": "user", "content": "."}]))
    unused = sorted(tokenizer.special_ids - taken)
    if not unused:
        raise InputError(
            "This target has no unused special token for the mask; choose a rare token with "
            "--mask-token-id."
        )
    return unused[-1]


def _rope_theta(text: dict[str, Any]) -> float:
    parameters = text.get("rope_parameters") or {}
    if "full_attention" in parameters:  # one for each kind of layer
        parameters = parameters["full_attention"]
    return float(parameters.get("rope_theta") or text.get("rope_theta") or 10000.0)
