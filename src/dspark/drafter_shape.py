"""The shape of a drafter that fits a target: its sizes, its mask token, its draft vocabulary.

It trains nothing and reads no answers.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from dspark.errors import InputError
from dspark.models.checkpoint import TargetSizes
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer


class TargetShape(Protocol):
    """What of a target decides the shape of its drafter; `Target` has it."""

    @property
    def spec(self) -> TargetSizes: ...
    @property
    def text_config(self) -> Mapping[str, Any]: ...


def drafter_config(
    target: TargetShape, tokenizer: Tokenizer | None, recipe: Recipe
) -> DrafterConfig:
    """The sizes of a drafter that fits `target`: its layers are as wide as the target's.

    Without a tokenizer the mask token is only a placeholder: for planning.
    """
    text = target.text_config
    num_heads = text["num_attention_heads"]
    size = None
    if recipe.draft_vocab_size is not None and recipe.draft_vocab_size < target.spec.vocab_size:
        size = recipe.draft_vocab_size
    kind = DrafterKind.DSPARK if recipe.kind == "dflash" else DrafterKind(recipe.kind)
    mask_token_id = None
    if not kind.is_chain:
        mask_token_id = 0 if tokenizer is None else mask_token_of(target, tokenizer, recipe)
    return DrafterConfig(
        kind=kind,
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
        mask_token_id=mask_token_id,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        markov_rank=recipe.markov_rank,
        markov_head_type=recipe.markov_head,
        enable_confidence_head=recipe.has_confidence_head,
        tap_mixing=recipe.tap_mixing,
        draft_vocab_size=size,
    )


def mask_token_of(target: TargetShape, tokenizer: Tokenizer, recipe: Recipe) -> int:
    """The recipe's mask token, or one that no text and no chat of this target contains.

    Raises `InputError` if there is none to be found.
    """
    if recipe.mask_token_id is not None:
        return _checked_mask(recipe.mask_token_id, target, tokenizer)
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


def _checked_mask(mask_id: int, target: TargetShape, tokenizer: Tokenizer) -> int:
    """A mask token that exists and that no text can hold (UC-079)."""
    num_rows = target.spec.vocab_size
    if not 0 <= mask_id < num_rows:
        raise InputError(
            f"The mask token is {mask_id}, but the target's embedding has the rows "
            f"0..{num_rows - 1}."
        )
    if mask_id in {*target.spec.eos_ids, *tokenizer.eos_ids}:
        raise InputError(
            f"The mask token is {mask_id}, which ends the target's answers; choose a token that "
            "never occurs in text."
        )
    return mask_id


def _rope_theta(text: Mapping[str, Any]) -> float:
    parameters = text.get("rope_parameters") or {}
    if "full_attention" in parameters:  # one for each kind of layer
        parameters = parameters["full_attention"]
    return float(parameters.get("rope_theta") or text.get("rope_theta") or 10000.0)
