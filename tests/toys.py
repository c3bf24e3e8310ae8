"""Toy target and drafters: tiny random models, fp32, made in milliseconds, no file."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.models.chain import ChainDrafter
from dspark.models.drafter import Drafter, DrafterConfig
from dspark.models.drafter_base import DrafterBase
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target

VOCAB_SIZE = 48
MASK_ID = 47
EOS_ID = 2

AnyDrafter = TypeVar("AnyDrafter", bound=DrafterBase)


def toy_target(
    *, seed: int = 0, scale: float = 8.0, layer_scale: float = 4.0, **changes: Any
) -> Target:
    """A Llama of 2 layers and width 32 whose distributions are neither flat nor one-hot.

    With `layer_scale` 0 its layers add nothing: the next token is a function of the last one.
    """
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes})).float()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(layer_scale)
        model.lm_head.weight.mul_(scale)
    return Target.wrap(model, name="toy")


def toy_drafter(target: Target, *, seed: int = 1, **changes: Any) -> Drafter:
    """A random drafter of one layer for a toy target."""
    own = {"target_layer_ids": (0, 1), "mask_token_id": MASK_ID, "markov_rank": 8}
    return _random(Drafter, target, seed=seed, changes={**own, **changes})


def toy_chain(
    target: Target, kind: DrafterKind = DrafterKind.EAGLE3, *, seed: int = 1, **changes: Any
) -> ChainDrafter:
    """A random EAGLE-3 drafter or MTP module for a toy target."""
    own = {
        "kind": kind,
        "target_layer_ids": (0, 1) if kind is DrafterKind.EAGLE3 else (target.spec.num_layers,),
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    return _random(ChainDrafter, target, seed=seed, changes={**own, **changes})


def _random(
    drafter_class: type[AnyDrafter], target: Target, *, seed: int, changes: dict[str, Any]
) -> AnyDrafter:
    values: Mapping[str, Any] = {
        "vocab_size": target.spec.vocab_size,
        "hidden_size": target.spec.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "num_target_layers": target.spec.num_layers,
        "block_size": 4,
    }
    d2t_S = changes.pop("d2t_S", None)
    if d2t_S is not None:
        changes["draft_vocab_size"] = len(d2t_S)
    drafter = drafter_class(
        DrafterConfig(**{**values, **changes}),
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        d2t_S=d2t_S,
        generator=torch.Generator().manual_seed(seed),
    )
    return drafter.requires_grad_(requires_grad=False)
