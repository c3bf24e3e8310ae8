"""How a drafter's config.json is written, and its tensors named: DeepSpec's flat keys, and ours.

It opens no file and knows no weight. Reading, also of other exporters: config_spellings.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dspark.models.drafter_config import DrafterConfig, DrafterKind

ARCHITECTURE = "Qwen3DSparkModel"
EAGLE3_ARCHITECTURE = "Qwen3Eagle3Model"
"""DeepSpec's, with norms per head."""
EAGLE3_LLAMA_ARCHITECTURE = "LlamaForCausalLMEagle3"
"""SpecForge's, without them."""
MTP_ARCHITECTURE = "Qwen3MTPModel"
FORMAT_VERSION = 1
LAYOUT = "anchor-first"
"""Slot 0 holds the anchor and already predicts; the other layout in use feeds K + 1 slots."""

LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
SIZE_KEYS = (*LAYER_KEYS, "block_size", "markov_rank")
"""Whole numbers that every spelling stores under the names of `DrafterConfig`."""


class VocabularyMap(StrEnum):
    """What the tensor `d2t` of a file holds."""

    TARGET_IDS = "target-ids"  # d2t[draft id] is the target id: what we write
    OFFSETS = "offsets"  # draft id + d2t[draft id] is the target id: SpecForge, speculators


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a drafter was trained for; travels in config.json under `dspark`."""

    target_name: str
    target_fingerprint: str
    """`checkpoint.target_fingerprint` of the target's embedding."""
    target_dtype: str
    """Arithmetic of the target whose hidden states were learnt, such as `bfloat16`."""
    template_hash: str | None
    """Of the chat template that rendered the training prompts; `None`: no template."""
    thinking: bool | None = None
    """Thinking mode of the answers that were learnt; `None`: the template's default."""
    system: str | None = None
    """System prompt of most of them; `None`: the template's default."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Anything JSON can hold: seeds, data, steps, held-out figures."""


def config_document(config: DrafterConfig, *, dtype: str, provenance: Provenance) -> dict[str, Any]:
    """The config.json of a drafter: the flat keys of its kind, and ours under `dspark`."""
    match config.kind:
        case DrafterKind.DSPARK:
            own = _block_keys(config)
        case DrafterKind.EAGLE3:
            own = _eagle3_keys(config)
        case DrafterKind.MTP:
            own = {"architectures": [MTP_ARCHITECTURE], "num_nextn_predict_layers": 1}
    document = {**own, **_layer_keys(config, dtype=dtype)}
    if config.draft_vocab_size is not None:
        document["draft_vocab_size"] = config.draft_vocab_size
    document["dspark"] = {
        "format_version": FORMAT_VERSION,
        "vocabulary_map": VocabularyMap.TARGET_IDS.value,
        "layer_windows": list(config.windows),
        "target": {
            "name": provenance.target_name,
            "fingerprint": provenance.target_fingerprint,
            "dtype": provenance.target_dtype,
            "template_hash": provenance.template_hash,
            "thinking": provenance.thinking,
            "system": provenance.system,
        },
        "recipe": dict(provenance.recipe),
    }
    if config.kind is DrafterKind.DSPARK:
        document["dspark"]["layout"] = LAYOUT
    return document


def file_name(config: DrafterConfig, name: str) -> str:
    """The name in a file of the tensor that the module calls `name`."""
    if config.kind is not DrafterKind.MTP:
        return name
    layer = f"model.layers.{config.num_target_layers}."
    shared = {"norm.weight": "shared_head.norm.weight", "lm_head.weight": "shared_head.head.weight"}
    if name == "d2t":
        return name
    return layer + shared.get(name, name.removeprefix("layers.0."))


def module_name(kind: DrafterKind, name: str) -> str:
    """The other way round, for every spelling of the kind's files."""
    match kind:
        case DrafterKind.DSPARK:
            return name
        case DrafterKind.EAGLE3:
            return re.sub(r"^(model\.)?(midlayer\.)?", lambda m: "layers.0." if m[2] else "", name)
        case DrafterKind.MTP:
            found = re.fullmatch(r"model\.layers\.\d+\.(.+)", name)
            inside = name if found is None else found[1]
            shared = {
                "shared_head.norm.weight": "norm.weight",
                "shared_head.head.weight": "lm_head.weight",
            }
            is_whole = found is None or inside == "embed_tokens.weight"
            return shared.get(inside, inside if is_whole else f"layers.0.{inside}")


def _layer_keys(config: DrafterConfig, *, dtype: str) -> dict[str, Any]:
    """What any transformers configuration says of layers like ours."""
    widths = {window for window in config.windows if window is not None}
    return {
        "model_type": "qwen3" if config.has_head_norms else "llama",
        "dtype": dtype,
        **{name: getattr(config, name) for name in LAYER_KEYS},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "rope_parameters": {
            "rope_type": "default",
            **(config.rope_scaling or {}),
            "rope_theta": config.rope_theta,
        },
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in config.windows
        ],
        "use_sliding_window": bool(widths),
        "sliding_window": max(widths) if widths else None,
    }


def _block_keys(config: DrafterConfig) -> dict[str, Any]:
    document: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "markov_rank": config.markov_rank,
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
        "enable_confidence_head": config.enable_confidence_head,
        "sample_from_anchor": True,
    }
    if config.enable_confidence_head:
        document["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.markov_rank > 0:
        document["markov_head_type"] = config.markov_head_type
    if config.tap_mixing:
        document["tap_mixing"] = True
    return document


def _eagle3_keys(config: DrafterConfig) -> dict[str, Any]:
    name = EAGLE3_ARCHITECTURE if config.has_head_norms else EAGLE3_LLAMA_ARCHITECTURE
    return {
        "architectures": [name],
        "ttt_length": config.block_size,
        "draft_num_hidden_layers": 1,
        "norm_before_residual": config.has_normed_residual,
    }
