"""How a drafter's config.json is written: DeepSpec's flat keys, and what we add to them.

It opens no file and knows no weight. Reading, also of other exporters: config_spellings.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dspark.models.drafter_config import DrafterConfig

ARCHITECTURE = "Qwen3DSparkModel"
FORMAT_VERSION = 1
LAYOUT = "anchor-first"
"""Slot 0 holds the anchor and already predicts; the other layout in use feeds K + 1 slots."""

SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "block_size",
    "markov_rank",
)
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
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Anything JSON can hold: seeds, data, steps, held-out figures."""


def config_document(config: DrafterConfig, *, dtype: str, provenance: Provenance) -> dict[str, Any]:
    """The config.json of a drafter: DeepSpec's flat keys, and ours under `dspark`."""
    widths = {window for window in config.windows if window is not None}
    document: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        **{name: getattr(config, name) for name in SIZE_KEYS},
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
        "enable_confidence_head": config.enable_confidence_head,
        "sample_from_anchor": True,
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
    if config.enable_confidence_head:
        document["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.markov_rank > 0:
        document["markov_head_type"] = config.markov_head_type
    if config.draft_vocab_size is not None:
        document["draft_vocab_size"] = config.draft_vocab_size
    document["dspark"] = {
        "format_version": FORMAT_VERSION,
        "layout": LAYOUT,
        "vocabulary_map": VocabularyMap.TARGET_IDS.value,
        "layer_windows": list(config.windows),
        "target": {
            "name": provenance.target_name,
            "fingerprint": provenance.target_fingerprint,
            "dtype": provenance.target_dtype,
            "template_hash": provenance.template_hash,
        },
        "recipe": dict(provenance.recipe),
    }
    return document
