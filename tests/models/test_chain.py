"""Chain drafters: the arithmetic of published files, and directories of every kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from dspark.errors import ModelError
from dspark.models.chain import ChainDrafter
from dspark.models.checkpoint import Provenance, load_drafter, save_drafter, target_fingerprint
from dspark.models.drafter_config import DrafterConfig, DrafterKind
from dspark.models.kinds import drafter_of
from tests.models.test_checkpoint import ToyTarget
from tests.models.toy_drafters import CONFIG, toy_tables

V, D, S = CONFIG.vocab_size, CONFIG.hidden_size, 10
OFFSETS_S = torch.tensor([4, 4, 6, 6, 9, 9, 9, 20, 20, 30])
LENGTH = 6


def chain_config(kind: DrafterKind = DrafterKind.EAGLE3, **changes: Any) -> DrafterConfig:
    own = {
        "kind": kind,
        "num_hidden_layers": 1,
        "layer_windows": None,
        "markov_rank": 0,
        "mask_token_id": None,
        "enable_confidence_head": False,
        "confidence_head_with_markov": None,
        "target_layer_ids": (0, 1, 3) if kind is DrafterKind.EAGLE3 else (4,),
    }
    return replace(CONFIG, **{**own, **changes})


def toy_chain(kind: DrafterKind, *, seed: int = 0, d2t_S: Tensor | None = None, **changes: Any):
    """A chain over the toy tables in which every part matters."""
    if d2t_S is not None:
        changes["draft_vocab_size"] = len(d2t_S)
    embed_weight_VD, head_weight_VD = toy_tables()
    generator = torch.Generator().manual_seed(seed)
    drafter = drafter_of(
        chain_config(kind, **changes),
        embed_weight_VD=embed_weight_VD,
        head_weight_VD=head_weight_VD,
        d2t_S=d2t_S,
        generator=generator,
    )
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return drafter


def causal(_layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
    out = functional.scaled_dot_product_attention(
        q_NHE.transpose(0, 1),
        k_NGE.transpose(0, 1),
        v_NGE.transpose(0, 1),
        is_causal=True,
        enable_gqa=True,
    )
    return out.transpose(0, 1)


def first_logits(drafter: ChainDrafter) -> Tensor:
    """Logits [LENGTH, S] of the first slot after each of a few committed positions."""
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(LENGTH, drafter.config.taps_size, generator=generator)
    ids = torch.randint(V, (LENGTH,), generator=generator)
    state = drafter.advance(drafter.state(taps), ids, torch.arange(LENGTH), causal)
    return drafter.base_logits(drafter.hidden(state))


def reference_eagle3(
    tensors: dict[str, Tensor], embed_VD: Tensor, *, is_normed_residual: bool
) -> Tensor:
    """The published layer, written from its description over the tensors' published names."""
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(LENGTH, 3 * D, generator=generator)
    ids = torch.randint(V, (LENGTH,), generator=generator)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors[name]

    def rope(x: Tensor) -> Tensor:  # [T, heads, 8]
        frequency = 10000.0 ** (-torch.arange(4) / 4)
        angle = torch.arange(LENGTH)[:, None, None] * frequency
        a, b = x[..., :4], x[..., 4:]
        return torch.cat(
            (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1
        )

    layer = "midlayer."
    state = taps @ tensors["fc.weight"].T
    hidden = norm(state, layer + "hidden_norm.weight")
    both = torch.cat((norm(embed_VD[ids], layer + "input_layernorm.weight"), hidden), dim=-1)
    q, k, v = (
        (both @ tensors[f"{layer}self_attn.{x}_proj.weight"].T).view(LENGTH, -1, 8) for x in "qkv"
    )
    q, k = rope(q), rope(k)
    out = torch.zeros(LENGTH, 4, 8)
    for t in range(LENGTH):
        for head in range(4):
            weights = (k[: t + 1, head // 2] @ q[t, head] / 8**0.5).softmax(0)
            out[t, head] = weights @ v[: t + 1, head // 2]
    x = hidden if is_normed_residual else state
    x = x + out.flatten(1) @ tensors[layer + "self_attn.o_proj.weight"].T
    normed = norm(x, layer + "post_attention_layernorm.weight")
    gate, up = (normed @ tensors[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    x = x + (functional.silu(gate) * up) @ tensors[layer + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight") @ tensors["lm_head.weight"].T


def published_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint of the EAGLE-3 authors' format, toy sizes, float32, random."""
    generator = torch.Generator().manual_seed(seed)
    size = CONFIG.intermediate_size
    shapes = {
        "fc.weight": (D, 3 * D),
        "norm.weight": (D,),
        "lm_head.weight": (S, D),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (32, 2 * D),
        "midlayer.self_attn.k_proj.weight": (16, 2 * D),
        "midlayer.self_attn.v_proj.weight": (16, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, 32),
        "midlayer.mlp.gate_proj.weight": (size, D),
        "midlayer.mlp.up_proj.weight": (size, D),
        "midlayer.mlp.down_proj.weight": (D, size),
    }
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 2 else 1.0)
        for name, shape in shapes.items()
    }
    tensors["d2t"] = OFFSETS_S.clone()
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool)
    return tensors


def published_document(**changes: Any) -> dict[str, Any]:
    """config.json of the same; a change to `...` removes the key."""
    document = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": V,
        "draft_vocab_size": S,
        "hidden_size": D,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "target_layer_ids": [0, 1, 3],
        "ttt_length": 4,
        "tie_word_embeddings": False,
    } | changes
    return {key: value for key, value in document.items() if value is not ...}


def written(path: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(document))
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("is_normed_residual", [False, True])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.layers.0."])
def test_published_eagle3_weights_draft_as_their_authors_describe(
    tmp_path: Path, prefix: str, is_normed_residual: bool
) -> None:
    """UC-091, UC-076: names, own LM head, map of offsets, RoPE and residual, against plain sums."""
    tensors = published_tensors()
    stored = {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}
    written(tmp_path, published_document(norm_before_residual=is_normed_residual), stored)
    target, findings = ToyTarget.toy(), []
    drafter = load_drafter(tmp_path, target, report=findings.append)
    assert isinstance(drafter, ChainDrafter)
    assert not drafter.config.has_head_norms
    assert drafter.d2t_S is not None
    assert drafter.d2t_S.tolist() == (OFFSETS_S + torch.arange(S)).tolist()
    assert findings == ["The drafter's lm_head.weight differs from the target's; its own is used."]
    expected = reference_eagle3(
        tensors, target.embed_weight_VD, is_normed_residual=is_normed_residual
    )
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(first_logits(drafter), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (DrafterKind.EAGLE3, {}),
        (DrafterKind.EAGLE3, {"has_head_norms": False, "has_normed_residual": True}),
        (DrafterKind.EAGLE3, {"d2t_S": torch.arange(7)}),
        (DrafterKind.EAGLE3, {"d2t_S": torch.tensor([3, 39, 5]), "layer_windows": (5,)}),
        (DrafterKind.MTP, {"block_size": 1}),
        (DrafterKind.MTP, {"target_layer_ids": (3,), "attention_bias": True}),
    ],
)
def test_a_saved_chain_comes_back_bit_for_bit(
    tmp_path: Path, kind: DrafterKind, changes: dict[str, Any]
) -> None:
    """UC-080, UC-092: configuration, every tensor and the logits; saved again, the same bytes."""
    drafter = toy_chain(kind, **changes)
    target = ToyTarget.toy()
    provenance = Provenance(
        target_name="toy",
        target_fingerprint=target_fingerprint(target.embed_weight_VD),
        target_dtype="float32",
        template_hash=None,
        recipe={"steps": 3},
    )
    save_drafter(drafter, tmp_path / "a", provenance=provenance)
    findings: list[str] = []
    loaded = load_drafter(tmp_path / "a", target, report=findings.append)
    assert findings == []
    assert isinstance(loaded, ChainDrafter)
    assert loaded.config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name])
    assert torch.equal(first_logits(loaded), first_logits(drafter))
    save_drafter(loaded, tmp_path / "b", provenance=provenance)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_mtp_module_is_stored_under_deepseeks_names(tmp_path: Path) -> None:
    """UC-091: the layer after the target's last, the norm of the shared head."""
    drafter = toy_chain(DrafterKind.MTP)
    provenance = Provenance(
        target_name="toy", target_fingerprint="0", target_dtype="float32", template_hash=None
    )
    save_drafter(drafter, tmp_path, provenance=provenance)
    names = {
        name.removeprefix("model.layers.4.") for name in load_file(tmp_path / "model.safetensors")
    }
    assert names == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("kind", [DrafterKind.EAGLE3, DrafterKind.MTP])
@pytest.mark.parametrize("has_head_norms", [True, False])
def test_packed_products_change_nothing_but_rounding(
    kind: DrafterKind, has_head_norms: bool
) -> None:
    drafter = toy_chain(kind, has_head_norms=has_head_norms, d2t_S=torch.tensor([3, 39, 5]))
    with torch.no_grad():
        expected = first_logits(drafter)
        drafter.pack()
        torch.testing.assert_close(first_logits(drafter), expected, atol=1e-3, rtol=1e-3)


def test_a_tensor_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = published_tensors()
    tensors["layers.0.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].clone()
    written(tmp_path, published_document(), tensors)
    with pytest.raises(ModelError, match=r"stores both .*hidden_norm\.weight, which are the same"):
        load_drafter(tmp_path, ToyTarget.toy())


def test_padded_vocabularies_fit_a_chain_too(tmp_path: Path) -> None:
    """UC-074, UC-075: a drafter of 40 rows, a target of 48, a tokenizer of 38 tokens."""
    drafter = toy_chain(DrafterKind.EAGLE3)
    provenance = Provenance(
        target_name="toy", target_fingerprint="0", target_dtype="float32", template_hash=None
    )
    save_drafter(drafter, tmp_path, provenance=provenance)
    embed_VD, head_VD = (torch.cat((table, table[:8])) for table in toy_tables())
    target = ToyTarget(embed_VD, head_VD, spec=replace(ToyTarget.toy().spec, vocab_size=48))
    with pytest.warns(UserWarning, match="was trained for"):
        loaded = load_drafter(tmp_path, target, num_tokens=38)
    assert loaded.config.vocab_size == 48
    torch.testing.assert_close(first_logits(loaded), first_logits(drafter)[:, :38])
