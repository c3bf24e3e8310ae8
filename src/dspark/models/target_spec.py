"""What a Hugging Face causal LM looks like to the rest: sizes, layers, and whether it is supported.

It reads configurations and runs one token; it knows no file.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dspark.errors import ModelError, first_line
from dspark.models.attention import AttentionProbe, LayerShape

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What others need to know of a target without touching its weights."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    eos_ids: tuple[int, ...]
    layer_shapes: tuple[LayerShape, ...]
    layer_windows: tuple[int | None, ...]


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse by name what the paged cache cannot hold or roll back (UC-054)."""
    text = text_config_of(config)
    told = getattr(config.get_text_config(), "layer_types", None)  # not all store it
    kinds = {*(told or ()), *(text.get("layer_types") or ())} - _PLAIN_LAYERS
    if kinds:
        raise ModelError(
            f"Target of type {config.model_type} has layers of kind {sorted(kinds)}, whose state "
            "cannot be rolled back after a rejected draft; use a model of full or sliding "
            "attention layers."
        )
    if text.get("use_bidirectional_attention") or text.get("is_causal") is False:
        raise ModelError(f"Target of type {config.model_type} is not causal; use a causal LM.")
    if text.get("num_kv_shared_layers"):
        raise ModelError(
            f"Target of type {config.model_type} shares keys between layers "
            f"(num_kv_shared_layers {text['num_kv_shared_layers']}), which is not supported."
        )


def text_config_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The language model's own configuration, as transformers stores it."""
    values: dict[str, Any] = config.get_text_config().to_dict()
    return values


def head_scale_of(config: PreTrainedConfig) -> float:
    """What logits are multiplied by behind the LM head."""
    text = text_config_of(config)
    if text.get("logits_scaling"):  # Granite divides
        return 1.0 / float(text["logits_scaling"])
    return float(text.get("logit_scale") or 1.0)  # Cohere multiplies


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """All of them, in order. Raises `ModelError` where there is no list of them."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"Target of type {model.config.model_type} has no list of decoder layers; "
            "use a decoder-only causal LM."
        )
    return layers


def probe_of(model: PreTrainedModel) -> tuple[AttentionProbe, Tensor]:
    """What attention is asked for in a pass over one token, and that token's logits [1, V].

    Raises `ModelError` for a model that cannot run on the paged attention.
    """
    probe = AttentionProbe()
    ids_11 = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            output = model(input_ids=ids_11, position_ids=ids_11, use_cache=False, probe=probe)
    except (TypeError, NotImplementedError, AttributeError, ValueError) as error:
        raise ModelError(
            f"Target of type {model.config.model_type} does not run on a plugged-in attention: "
            f"{first_line(error)}."
        ) from error
    num_layers = len(decoder_layers(model))
    if len(probe.modules) < num_layers:
        raise ModelError(
            f"Target of type {model.config.model_type} attends in {len(probe.modules)} of its "
            f"{num_layers} layers; the state of the others cannot be rolled back after a rejected "
            "draft, so use a model of full or sliding attention layers."
        )
    if len(probe.modules) > num_layers:
        raise ModelError(
            f"Target of type {model.config.model_type} attends {len(probe.modules)} times over "
            f"{num_layers} layers; only one attention a layer is supported."
        )
    return probe, output.logits[0]


def spec_of(model: PreTrainedModel, *, name: str, probe: AttentionProbe) -> TargetSpec:
    """Sizes from the configuration and from what was probed."""
    text = text_config_of(model.config)
    generation = getattr(model, "generation_config", None)
    eos = generation.eos_token_id if generation is not None else None
    eos = eos if eos is not None else text.get("eos_token_id")
    eos_ids = tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (eos,))
    return TargetSpec(
        name=name,
        model_type=model.config.model_type,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=text["hidden_size"],
        num_layers=len(probe.modules),
        max_positions=int(text.get("max_position_embeddings") or 2048),
        eos_ids=eos_ids,
        layer_shapes=tuple(probe.shapes),
        layer_windows=tuple(probe.windows),
    )
