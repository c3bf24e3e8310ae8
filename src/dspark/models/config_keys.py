"""The keys that a drafter's config.json may hold, and what each may be. It interprets none."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from dspark.errors import ModelError
from dspark.models.drafter_format import SIZE_KEYS


class Kind(StrEnum):
    """What a JSON value must be, in the words of the error."""

    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "a text"
    OBJECT = "an object"
    WHOLES = "a list of whole numbers"
    WHOLE_OR_WHOLES = "a whole number or a list of them"
    TEXTS = "a list of texts"
    WINDOWS = "a list of whole numbers and nulls"


SHIFTED_LAYER_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Layer ids counted from the embedding: one more than ours."""

SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

SECTIONS = ("dflash_config", "dspark_config", "transformer_layer_config")
"""Objects in which other exporters keep some of the keys."""

READ: Mapping[str, Kind] = {
    **dict.fromkeys(SIZE_KEYS, Kind.WHOLE),
    **dict.fromkeys(SHIFTED_LAYER_KEYS, Kind.WHOLES),
    **dict.fromkeys(SPECIAL_KEYS, Kind.WHOLE_OR_WHOLES),
    "target_layer_ids": Kind.WHOLES,
    "num_target_layers": Kind.WHOLE,
    "mask_token_id": Kind.WHOLE,
    "num_anchors": Kind.WHOLE,
    "draft_vocab_size": Kind.WHOLE,
    "target_hidden_size": Kind.WHOLE,
    "markov_head_type": Kind.TEXT,
    "enable_confidence_head": Kind.FLAG,
    "confidence_head_with_markov": Kind.FLAG,
    "rms_norm_eps": Kind.NUMBER,
    "attention_bias": Kind.FLAG,
    "tap_mixing": Kind.FLAG,
    "hidden_act": Kind.TEXT,
    "rope_theta": Kind.NUMBER,
    "rope_parameters": Kind.OBJECT,
    "rope_scaling": Kind.OBJECT,
    "partial_rotary_factor": Kind.NUMBER,
    "rope_interleave": Kind.FLAG,
    "layer_types": Kind.TEXTS,
    "sliding_window": Kind.WHOLE,
    "use_sliding_window": Kind.FLAG,
    "max_window_layers": Kind.WHOLE,
    "sliding_window_non_causal": Kind.FLAG,
    "causal": Kind.FLAG,
    "attention_mode": Kind.TEXT,
    "sample_from_anchor": Kind.FLAG,
    "tie_word_embeddings": Kind.FLAG,
    "ttt_length": Kind.WHOLE,
    "draft_num_hidden_layers": Kind.WHOLE,
    "num_nextn_predict_layers": Kind.WHOLE,
    "use_aux_hidden_state": Kind.FLAG,
    "norm_before_residual": Kind.FLAG,
    "norm_before_fc": Kind.FLAG,
    "norm_output": Kind.FLAG,
    "fc_norm": Kind.FLAG,
    "mlp_bias": Kind.FLAG,
    "qkv_bias": Kind.FLAG,
}
"""Keys that change how a drafter drafts."""

ROPE: Mapping[str, Kind] = {
    "rope_theta": Kind.NUMBER,
    "rope_type": Kind.TEXT,
    "type": Kind.TEXT,
    "partial_rotary_factor": Kind.NUMBER,
    "factor": Kind.NUMBER,
    "attention_factor": Kind.NUMBER,
    "beta_fast": Kind.NUMBER,
    "beta_slow": Kind.NUMBER,
    "mscale": Kind.NUMBER,
    "mscale_all_dim": Kind.NUMBER,
    "truncate": Kind.FLAG,
    "low_freq_factor": Kind.NUMBER,
    "high_freq_factor": Kind.NUMBER,
    "original_max_position_embeddings": Kind.WHOLE,
}
"""Keys of `rope_parameters` and `rope_scaling`."""

OURS: Mapping[str, Kind] = {
    "format_version": Kind.WHOLE,
    "layout": Kind.TEXT,
    "vocabulary_map": Kind.TEXT,
    "layer_windows": Kind.WINDOWS,
    "target": Kind.OBJECT,
    "recipe": Kind.OBJECT,
}
"""Keys of the object `dspark`."""

STRUCTURE: Mapping[str, Kind] = {
    "architectures": Kind.TEXTS,
    "speculators_model_type": Kind.TEXT,
    "projector_type": Kind.TEXT,
    "dspark": Kind.OBJECT,
    "eagle_config": Kind.OBJECT,
    "speculators_config": Kind.OBJECT,
    **dict.fromkeys(SECTIONS, Kind.OBJECT),
}
"""Keys that say what kind of file it is, and where the others are."""

INERT = frozenset(
    (
        "auto_map",
        "attention_dropout",
        "confidence_head_alpha",
        "dtype",
        "torch_dtype",
        "initializer_range",
        "embed_requires_grad",
        "max_anchors",
        "model_type",
        "pretraining_tp",
        "speculators_version",
        "step_loss_decay",
        "target_model_name_or_path",
        "target_model_type",
        "transformers_version",
        "use_cache",
    )
)
"""Keys that change nothing in how a trained drafter drafts."""


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Refuse a value that is not of its key's kind; null is as good as absent."""
    for key, kind in kinds.items():
        value = values.get(key)
        if value is not None and not _is(value, kind):
            raise ModelError(
                f"config.json gives {key} as {value!r}, but it must be {kind.value}; "
                "take the file that came with these weights."
            )


def _is(value: object, kind: Kind) -> bool:
    match kind:
        case Kind.WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        case Kind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool)
        case Kind.FLAG:
            return isinstance(value, bool)
        case Kind.TEXT:
            return isinstance(value, str)
        case Kind.OBJECT:
            return isinstance(value, Mapping)
        case Kind.WHOLE_OR_WHOLES:
            return _is(value, Kind.WHOLE) or _is(value, Kind.WHOLES)
        case Kind.WHOLES:
            return isinstance(value, list) and all(_is(item, Kind.WHOLE) for item in value)
        case Kind.TEXTS:
            return isinstance(value, list) and all(_is(item, Kind.TEXT) for item in value)
        case Kind.WINDOWS:
            known = [item for item in value if item is not None] if isinstance(value, list) else 0
            return _is(known, Kind.WHOLES)
