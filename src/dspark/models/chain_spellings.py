"""What config.json says of an EAGLE-3 drafter or an MTP module, in the spellings of its exporters.

SafeAILab and SpecForge (`midlayer`, no norms per head), DeepSpec (with them), speculators, and
our own. It opens no file and knows no weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.errors import ModelError
from dspark.models.config_keys import READ, SHIFTED_LAYER_KEYS, check_kinds
from dspark.models.drafter_config import DrafterKind
from dspark.models.drafter_format import (
    EAGLE3_ARCHITECTURE,
    EAGLE3_LLAMA_ARCHITECTURE,
    MTP_ARCHITECTURE,
)

_DEEPSPEC_EAGLE3 = frozenset((EAGLE3_ARCHITECTURE, "Eagle3DraftModel"))
_EAGLE3 = _DEEPSPEC_EAGLE3 | {EAGLE3_LLAMA_ARCHITECTURE, "Eagle3Speculator"}
_DEFAULT_BLOCK_SIZE = 5
_UNSUPPORTED = ("norm_before_fc", "norm_output", "fc_norm", "mlp_bias", "qkv_bias")
"""Flags of later variants that change the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFields:
    """Fields of a `DrafterConfig`, and a sentence for each thing that was assumed."""

    fields: Mapping[str, Any]
    findings: tuple[str, ...]


def chain_kind(document: Mapping[str, Any]) -> DrafterKind | None:
    """The kind of a chain drafter; `None` for any other file."""
    names = set(document.get("architectures") or ())
    stated = document.get("speculators_model_type")
    if MTP_ARCHITECTURE in names and stated is None:
        return DrafterKind.MTP
    # the authors' own files carry the target's class name, and a draft vocabulary
    is_original = "LlamaForCausalLM" in names and "draft_vocab_size" in document
    if stated == "eagle3" or (stated is None and (is_original or names & _EAGLE3)):
        return DrafterKind.EAGLE3
    return None


def chain_fields(
    kind: DrafterKind,
    document: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    num_target_layers: int,
) -> ChainFields:
    """`values`: the document's keys on one level, their kinds checked.

    Raises `ModelError` for a variant whose arithmetic is not ours.
    """
    _check_variant(values)
    block_size, findings = _block_size(document, values)
    fields: dict[str, Any] = {
        "num_hidden_layers": 1,
        "num_key_value_heads": values.get("num_key_value_heads", values.get("num_attention_heads")),
        "head_dim": values.get("head_dim") or _head_dim(values),
        "block_size": block_size,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "has_head_norms": _has_head_norms(document),
        "has_normed_residual": bool(values.get("norm_before_residual", False)),
    }
    if kind is DrafterKind.MTP:
        fields["target_layer_ids"] = tuple(values.get("target_layer_ids", (num_target_layers,)))
    else:
        fields["target_layer_ids"], more = _target_layer_ids(document, values, num_target_layers)
        findings += more
    return ChainFields(fields=fields, findings=findings)


def _check_variant(values: Mapping[str, Any]) -> None:
    for key in _UNSUPPORTED:
        if values.get(key):
            raise ModelError(
                f"The drafter's {key} is {values[key]!r}, a variant that this engine would draft "
                "wrongly; use one without it."
            )
    for key in ("num_hidden_layers", "draft_num_hidden_layers", "num_nextn_predict_layers"):
        if values.get(key, 1) != 1:
            raise ModelError(
                f"The drafter's {key} is {values[key]!r}, but a chain has 1 layer; use such a one."
            )


def _head_dim(values: Mapping[str, Any]) -> int:
    if not values.get("hidden_size") or not values.get("num_attention_heads"):
        raise ModelError(
            "config.json has no head_dim, hidden_size or num_attention_heads; take the file that "
            "came with these weights."
        )
    return int(values["hidden_size"]) // int(values["num_attention_heads"])


def _has_head_norms(document: Mapping[str, Any]) -> bool:
    """Qwen's layers have them, Llama's do not; DeepSpec copies the target's `model_type`."""
    layer = document.get("transformer_layer_config") or document
    names = set(document.get("architectures") or ())
    if document.get("speculators_model_type") is None and names & _DEEPSPEC_EAGLE3:
        return True
    return str(layer.get("model_type", "llama")).startswith("qwen3")


def _block_size(
    document: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[int, tuple[str, ...]]:
    """Ours, else the horizon of the training, else what the exporter proposes, else 5 aloud."""
    for key in ("block_size", "ttt_length"):
        if key in values:
            return int(values[key]), ()
    if "num_nextn_predict_layers" in values:
        return 1, ()
    proposals = (document.get("speculators_config") or {}).get("proposal_methods") or ()
    for proposal in proposals:
        if isinstance(proposal, Mapping) and isinstance(proposal.get("speculative_tokens"), int):
            return int(proposal["speculative_tokens"]), ()
    return _DEFAULT_BLOCK_SIZE, (
        f"config.json does not say how many tokens are drafted; {_DEFAULT_BLOCK_SIZE} is assumed.",
    )


def _target_layer_ids(
    document: Mapping[str, Any], values: Mapping[str, Any], num_target_layers: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """In our count (output of layer i), from five spellings (UC-088)."""
    section = document.get("eagle_config") or {}
    check_kinds(section, READ)
    if section.get("use_aux_hidden_state") is False or values.get("use_aux_hidden_state") is False:
        raise ModelError(
            "The drafter's use_aux_hidden_state is false: it reads one state of the target, not "
            "the fused three; use an EAGLE-3 drafter."
        )
    if "target_layer_ids" in values:
        return tuple(values["target_layer_ids"]), ()
    for key in SHIFTED_LAYER_KEYS:
        if key in values:
            return tuple(i - 1 for i in values[key]), ()
    nested = section.get("eagle_aux_hidden_state_layer_ids")
    if nested is not None:
        return tuple(nested), (
            f"The drafter's eagle_config names layers {nested}; they are taken as outputs of "
            "these layers, counted from 0. A low acceptance may mean that they are inputs.",
        )
    ids = (1, num_target_layers // 2 - 1, num_target_layers - 4)
    if not 1 < ids[1] < ids[2]:
        raise ModelError(
            f"config.json does not name the target's layers that the drafter reads, and {ids} "
            f"are none for {num_target_layers} layers; write target_layer_ids."
        )
    return ids, (f"config.json does not name the target's layers; {ids}, the usual, are read.",)
