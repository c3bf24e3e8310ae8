"""A drafter's directory: what is written, what is read, and every way in which it may not fit."""

import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import CapacityError, ModelError, NumericsError
from dspark.models.checkpoint import (
    check_state,
    load_drafter,
    read_provenance,
    save_drafter,
    target_fingerprint,
)
from dspark.models.config_spellings import parse_config
from dspark.models.drafter import Drafter
from tests.models.test_config_spellings import (
    GOLDEN,
    PROVENANCE,
    flat,
    specforge_one_section,
    speculators,
)
from tests.models.test_directory import small_disk
from tests.models.toy_drafters import CONFIG, random_taps, serve_block, toy_drafter, toy_tables

HEADS = pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
D2T_S = torch.tensor([7, 0, 39, 12, 30])


@dataclass(frozen=True)
class ToySizes:
    name: str = "toy"
    vocab_size: int = 40
    hidden_size: int = 32
    num_layers: int = 4
    max_positions: int = 64
    eos_ids: tuple[int, ...] = (2,)


@dataclass(frozen=True)
class ToyTarget:
    """The weights that a drafter borrows, and the sizes that it must fit."""

    embed_weight_VD: Tensor
    head_weight_VD: Tensor
    spec: ToySizes = field(default_factory=ToySizes)

    @classmethod
    def toy(cls, **sizes) -> "ToyTarget":
        """The target of every toy drafter."""
        return cls(*toy_tables(), spec=ToySizes(**sizes))


def saved(path: Path, drafter: Drafter | None = None) -> ToyTarget:
    """Saves a drafter (seed 0) at `path`; returns its target."""
    target = ToyTarget.toy()
    save_drafter(drafter or toy_drafter(), path, provenance=provenance(target))
    return target


def provenance(target: ToyTarget):
    fingerprint = target_fingerprint(target.embed_weight_VD)
    return replace(PROVENANCE, target_fingerprint=fingerprint, recipe={"steps": 3})


def exported(path: Path, document: dict, tensors: dict[str, Tensor]) -> None:
    """A directory as another program would write it."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(document))
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors")


def changed(path: Path, **tensors) -> None:
    """Rewrites some tensors of a saved drafter; `None` removes one. `__` stands for a dot."""
    state = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, path / "model.safetensors")


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def loaded(path: Path, target: ToyTarget, **options) -> tuple[Drafter, list[str]]:
    findings: list[str] = []
    return load_drafter(path, target, report=findings.append, **options), findings


def draft_logits(drafter: Drafter, anchor: int = 5) -> Tensor:
    """Corrected logits [K, S] of one block, teacher forced with token 3."""
    hidden_KD = serve_block(drafter, random_taps(drafter, anchor), 3, anchor)
    logits_KS = drafter.base_logits(hidden_KD)
    if drafter.markov_head is not None:
        prev_ids_RK = torch.full((1, drafter.config.block_size), 3)
        logits_KS = logits_KS + drafter.markov_head.unroll(prev_ids_RK, hidden_KD[None])[0]
    return logits_KS


# What is written


def test_the_published_names_and_shapes_pass_the_loaders_check():
    """UC-091: the documented tensors of DeepSpec's 4B drafter, against the documented config."""
    config = parse_config(GOLDEN["config"]).config
    assert check_state(config, GOLDEN["tensors"]) == ()
    for kind, tensors in GOLDEN["tensors_of_other_heads"].items():
        other = replace(config, markov_head_type=kind)
        assert check_state(other, GOLDEN["tensors"] | tensors) == ()
        with pytest.raises(ModelError, match=r"lacks tensor markov_head\."):
            check_state(other, GOLDEN["tensors"])


def test_the_redundant_embedding_and_head_may_be_left_out():
    config = parse_config(GOLDEN["config"]).config
    left_out = {"embed_tokens.weight", "lm_head.weight"}
    rest = {name: shape for name, shape in GOLDEN["tensors"].items() if name not in left_out}
    assert check_state(config, rest) == ()


def test_our_file_has_exactly_the_published_names(tmp_path):
    """UC-087, UC-091: the key list of a save equals the golden one; shared tensors are absent."""
    saved(tmp_path / "d")
    names = set(load_file(tmp_path / "d/model.safetensors"))
    shared = {"embed_tokens.weight", "lm_head.weight"}
    golden = {
        n for n in GOLDEN["tensors"] if not n.startswith(("layers.2", "layers.3", "layers.4"))
    }
    assert names == golden - shared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d2t_S", [None, D2T_S])
@HEADS
def test_a_save_reloads_bit_for_bit(tmp_path, head, d2t_S, dtype):
    """UC-076, UC-086, UC-091, UC-092: every head, both vocabularies, both dtypes."""
    changes = {"markov_rank": 0} if head == "none" else {"markov_head_type": head}
    if d2t_S is not None:
        changes["draft_vocab_size"] = len(d2t_S)
    drafter = toy_drafter(d2t_S=d2t_S, **changes).to(dtype)
    target = saved(tmp_path / "d", drafter)
    again, findings = loaded(tmp_path / "d", target)
    assert findings == []
    assert again.config == drafter.config
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert again.state_dict()[name].dtype == dtype
        assert torch.equal(again.state_dict()[name], tensor)
    assert torch.equal(draft_logits(again), draft_logits(drafter))


def test_a_loaded_drafter_copies_nothing_of_the_target(tmp_path):
    target = saved(tmp_path / "d")
    drafter, _ = loaded(tmp_path / "d", target)
    assert drafter.embed_weight_VD.data_ptr() == target.embed_weight_VD.data_ptr()
    assert drafter.head_weight_SD.data_ptr() == target.head_weight_VD.data_ptr()
    assert sum(file.stat().st_size for file in (tmp_path / "d").iterdir()) < 120_000


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("owns_embedding", "owns_head"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_own_or_shared_tables_survive_a_round_trip(tmp_path, is_tied, owns_embedding, owns_head):
    """UC-080: target tied or untied times drafter with its own or the target's tables."""
    tables = torch.randn(4, 40, 32, generator=torch.Generator().manual_seed(3))
    target = ToyTarget(tables[0], tables[0] if is_tied else tables[1])
    drafter = Drafter(
        CONFIG,
        embed_weight_VD=tables[2] if owns_embedding else target.embed_weight_VD,
        head_weight_VD=tables[3] if owns_head else target.head_weight_VD,
        generator=torch.Generator().manual_seed(0),
        has_own_embedding=bool(owns_embedding),
        has_own_head=bool(owns_head),
    )
    save_drafter(drafter, tmp_path / "d", provenance=provenance(target))
    again, findings = loaded(tmp_path / "d", target)
    assert len(findings) == owns_embedding + owns_head
    assert torch.equal(draft_logits(again), draft_logits(drafter))


def test_provenance_travels_with_the_drafter(tmp_path):
    target = saved(tmp_path / "d")
    assert read_provenance(tmp_path / "d") == provenance(target)


def test_saving_again_keeps_the_files_beside_the_weights(tmp_path):
    saved(tmp_path / "d")
    (tmp_path / "d/model_card.md").write_text("card")
    (tmp_path / "d/model-00001-of-00002.safetensors").write_text("stale shard")
    saved(tmp_path / "d", toy_drafter(1))
    assert names_in(tmp_path / "d") == {"config.json", "model.safetensors", "model_card.md"}


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": '{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": "weights"},
        {"model-00001-of-00002.safetensors": "weights"},
        {"config.json": "notes"},
    ],
)
def test_a_drafter_takes_the_place_of_no_other_model(tmp_path, files):
    """`dspark train --out` with the target's own directory replaced the target's weights."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match="holds a model that is no drafter"):
        saved(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_full_disk_leaves_the_last_save_intact(tmp_path):
    target = saved(tmp_path / "d")
    before = (tmp_path / "d/model.safetensors").read_bytes()
    with small_disk(8192), pytest.raises(CapacityError, match="no room"):
        saved(tmp_path / "d", toy_drafter(1))
    assert (tmp_path / "d/model.safetensors").read_bytes() == before
    assert names_in(tmp_path) == {"d"}
    loaded(tmp_path / "d", target)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_never_written(tmp_path, value):
    """UC-087, UC-115: the name of the tensor, and the last good save intact."""
    saved(tmp_path / "d")
    before = listing_bytes(tmp_path / "d")
    drafter = toy_drafter(1)
    drafter.layers[1].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        saved(tmp_path / "d", drafter)
    assert listing_bytes(tmp_path / "d") == before


def listing_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# What does not fit


def test_another_kind_of_drafter_is_refused_before_any_weight_is_read(tmp_path):
    """UC-082: there is no weight file at all, and still the kind is what is reported."""
    (tmp_path / "config.json").write_text(json.dumps(flat(architectures=["Gemma4Eagle3Model"])))
    with pytest.raises(ModelError, match=r"describes Gemma4Eagle3Model .* but a drafter is"):
        load_drafter(tmp_path, ToyTarget.toy())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(tmp_path, name):
    target = saved(tmp_path / "d")
    file = tmp_path / "d" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=rf"{name} (cannot be read|is damaged)"):
        load_drafter(tmp_path / "d", target)
    file.unlink()
    with pytest.raises(ModelError, match=rf"{name} does not exist"):
        load_drafter(tmp_path / "d", target)
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_drafter(tmp_path / "nowhere", target)
    with pytest.raises(ModelError, match="does not exist; give the directory of a drafter"):
        load_drafter(__file__, target)


def test_a_wrong_shape_names_key_found_and_expected(tmp_path):
    target = saved(tmp_path / "d")
    changed(tmp_path / "d", fc__weight=torch.zeros(32, 64))
    words = r"tensor fc\.weight has shape \[32, 64\], but its config\.json means \[32, 96\]"
    with pytest.raises(ModelError, match=words):
        load_drafter(tmp_path / "d", target)


@pytest.mark.parametrize(
    "name",
    [
        "fc__weight",
        "layers__1__self_attn__k_norm__weight",
        "markov_head__markov_w1__weight",
        "confidence_head__proj__weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    target = saved(tmp_path / "d")
    changed(tmp_path / "d", **{name: None})
    with pytest.raises(ModelError, match=f"lacks tensor {name.replace('__', '.')}"):
        load_drafter(tmp_path / "d", target)


def test_unknown_tensors_are_listed_and_change_nothing(tmp_path):
    """UC-085."""
    target = saved(tmp_path / "d")
    changed(tmp_path / "d", mtp__extra=torch.zeros(2), rotary_emb__inv_freq=torch.zeros(4))
    drafter, findings = loaded(tmp_path / "d", target)
    assert findings == ["The drafter has tensors that are not used: mtp.extra."]
    assert torch.equal(draft_logits(drafter), draft_logits(toy_drafter()))


def test_a_confidence_head_without_bias_loads(tmp_path):
    """UC-085."""
    target = saved(tmp_path / "d")
    changed(tmp_path / "d", confidence_head__proj__bias=None)
    drafter, findings = loaded(tmp_path / "d", target)
    assert findings == ["The drafter has no confidence_head.proj.bias; 0 is used."]
    assert drafter.confidence_head is not None
    assert drafter.confidence_head.proj.bias.tolist() == [0.0]


def test_heads_that_the_configuration_switches_off_are_listed(tmp_path):
    """UC-083, UC-085: a missing flag means no head, and its weights are not dropped silently."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    exported(tmp_path / "d", flat(enable_confidence_head=..., sample_from_anchor=True), state)
    drafter, findings = loaded(tmp_path / "d", target)
    assert drafter.confidence_head is None
    assert findings == [
        "The drafter has tensors that are not used: confidence_head.proj.bias, "
        "confidence_head.proj.weight."
    ]


@pytest.mark.parametrize("name", ["norm.weight", "markov_head.markov_w2.weight"])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, name):
    """UC-087."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    state[name] = torch.full_like(state[name], float("nan"))
    exported(tmp_path / "d", flat(), state)
    with pytest.raises(ModelError, match=f"tensor {name} holds NaN"):
        loaded(tmp_path / "d", target)


def test_quantized_weights_are_refused_by_name(tmp_path):
    target = saved(tmp_path / "d")
    changed(tmp_path / "d", fc__weight=torch.zeros(32, 96, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"tensor fc\.weight is stored as I8"):
        load_drafter(tmp_path / "d", target)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 64}, "hidden_size is 32, but target toy has 64"),
        ({"num_layers": 5}, "num_target_layers is 4, but target toy has 5"),
        ({"vocab_size": 48}, "vocab_size is 40, but target toy has 48"),
    ],
)
def test_another_target_is_refused_by_key(tmp_path, sizes, words):
    saved(tmp_path / "d")
    with pytest.raises(ModelError, match=words):
        load_drafter(tmp_path / "d", ToyTarget.toy(**sizes))


@pytest.mark.parametrize("mask_token_id", [40, 1000])
def test_a_mask_token_outside_the_embedding_is_refused(tmp_path, mask_token_id):
    """UC-079."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    exported(tmp_path / "d", flat(mask_token_id=mask_token_id), state)
    with pytest.raises(ModelError, match=f"mask_token_id is {mask_token_id}, but the embedding"):
        loaded(tmp_path / "d", target)


def test_a_mask_token_in_rows_that_only_the_drafter_has_works(tmp_path):
    """UC-079: the id comes from the checkpoint, and so does its row."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    own = torch.cat((target.embed_weight_VD, torch.randn(1, 32)))
    exported(tmp_path / "d", flat(mask_token_id=40), state | {"embed_tokens.weight": own})
    drafter, _ = loaded(tmp_path / "d", target)
    assert torch.equal(drafter.block_inputs(torch.tensor([3]))[1], own[40])
    save_drafter(drafter, tmp_path / "e", provenance=PROVENANCE)
    again, _ = loaded(tmp_path / "e", target)
    assert torch.equal(draft_logits(again), draft_logits(drafter))


def test_suspicions_are_sentences_and_not_refusals(tmp_path):
    """UC-065, UC-079, UC-102: what costs acceptance is told, the text stays exact."""
    drafter = toy_drafter()
    saved(tmp_path / "d", drafter)
    other = ToyTarget(
        drafter.embed_weight_VD.to(torch.bfloat16) + 1,
        drafter.head_weight_SD,
        spec=ToySizes(name="other", max_positions=128, eos_ids=(1, 39)),
    )
    trained = replace(PROVENANCE, template_hash="aa")
    save_drafter(drafter, tmp_path / "d", provenance=trained)
    _, findings = loaded(tmp_path / "d", other, template_hash="bb")
    words = ["ends the target's text", "trained for 64 positions", "weights 00ff"]
    words += ["arithmetic float32", "chat template aa"]
    assert len(findings) == len(words)
    assert all(word in finding for word, finding in zip(words, findings, strict=True))


def test_findings_become_warnings_where_nobody_listens(tmp_path):
    """UC-081: a file of DeepSpec says nothing of its layout."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    exported(tmp_path / "d", flat(), state)
    with pytest.warns(UserWarning, match="anchor-first is assumed"):
        load_drafter(tmp_path / "d", target)
    saved(tmp_path / "e")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(tmp_path / "e", target)


# Vocabularies


def reduced_state() -> dict[str, Tensor]:
    return toy_drafter(d2t_S=D2T_S, draft_vocab_size=5).state_dict()


@pytest.mark.parametrize("spelling", [specforge_one_section, speculators])
def test_maps_of_other_exporters_are_offsets(tmp_path, spelling):
    """UC-076: target id = draft id + d2t[draft id], with its own reduced LM head or without."""
    target = ToyTarget.toy()
    document = spelling() | {"draft_vocab_size": 5, "sample_from_anchor": True}
    state = reduced_state() | {
        "d2t": D2T_S - torch.arange(5),
        "t2d": torch.zeros(40, dtype=torch.bool),
        "lm_head.weight": target.head_weight_VD[D2T_S],
    }
    exported(tmp_path / "d", document, state)
    drafter, findings = loaded(tmp_path / "d", target)
    assert findings == []
    assert torch.equal(drafter.d2t_S, D2T_S)
    assert not drafter.has_own_head
    reference = toy_drafter(d2t_S=D2T_S, draft_vocab_size=5)
    assert torch.equal(draft_logits(drafter), draft_logits(reference))


@pytest.mark.parametrize(
    ("d2t_S", "ours", "words"),
    [
        (None, "target-ids", "lacks tensor d2t"),
        (torch.zeros(5, dtype=torch.int64), "target-ids", "5 different target ids"),
        (torch.zeros(5, dtype=torch.int64), "offsets", "d2t is all zeros"),
        (torch.tensor([7, 0, 40, 12, 30]), "target-ids", "different target ids below 40"),
        (torch.tensor([7, -1, 39, 12, 30]), "target-ids", "different target ids below 40"),
        (D2T_S[:4], "target-ids", r"tensor d2t has shape \[4\]"),
        (D2T_S, None, "does not say what d2t holds"),
    ],
)
def test_a_reduced_head_without_a_valid_map_is_refused(tmp_path, d2t_S, ours, words):
    """UC-076, UC-077."""
    document = flat(draft_vocab_size=5)
    if ours is not None:
        document["dspark"] = {"vocabulary_map": ours}
    state = reduced_state() | ({} if d2t_S is None else {"d2t": d2t_S})
    exported(tmp_path / "d", document, state)
    with pytest.raises(ModelError, match=words):
        loaded(tmp_path / "d", ToyTarget.toy())


def padded_target(num_rows: int) -> ToyTarget:
    """The toy target with more rows, as padded to a multiple of something."""
    target = ToyTarget.toy()
    extra = torch.randn(2, num_rows - 40, 32, generator=torch.Generator().manual_seed(9))
    return ToyTarget(
        torch.cat((target.embed_weight_VD, extra[0])),
        torch.cat((target.head_weight_VD, extra[1])),
        spec=ToySizes(vocab_size=num_rows),
    )


@pytest.mark.parametrize("stores_tables", [False, True])
def test_a_drafter_with_fewer_rows_than_the_target_works(tmp_path, stores_tables):
    """UC-074, UC-075: 64 and 40 rows, a tokenizer of 36: same logits, nothing else proposed."""
    target, state = padded_target(64), toy_drafter().state_dict()
    if stores_tables:
        own = ToyTarget.toy()
        state |= {"embed_tokens.weight": own.embed_weight_VD, "lm_head.weight": own.head_weight_VD}
    exported(tmp_path / "d", flat(sample_from_anchor=True), state)
    drafter, findings = loaded(tmp_path / "d", target, num_tokens=36)
    assert findings == []
    assert drafter.d2t_S is not None
    assert drafter.d2t_S.tolist() == list(range(36))
    assert torch.equal(draft_logits(drafter), draft_logits(toy_drafter())[:, :36])
    assert drafter.markov_head is not None
    drafter.block_inputs(torch.tensor([63]))
    drafter.markov_head.embed(torch.tensor([63]))


def test_a_drafter_with_more_rows_than_the_target_works(tmp_path):
    """UC-074: the padding is cut where it cannot occur; the logits that remain are the same."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        state[name] = torch.cat((state[name], torch.full((8, 6), 50.0)))
    exported(tmp_path / "d", flat(vocab_size=48, sample_from_anchor=True), state)
    drafter, _ = loaded(tmp_path / "d", target, num_tokens=40)
    assert drafter.config == CONFIG
    assert torch.equal(draft_logits(drafter), draft_logits(toy_drafter()))


def test_padding_is_never_proposed_even_with_the_largest_logits(tmp_path):
    """UC-075: rows beyond the tokenizer do not exist in the loaded head."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    state["markov_head.markov_w2.weight"][36:] = 1e4
    exported(tmp_path / "d", flat(sample_from_anchor=True), state)
    drafter, _ = loaded(tmp_path / "d", target, num_tokens=36)
    assert draft_logits(drafter).shape == (4, 36)
    assert drafter.head_weight_SD.data_ptr() == target.head_weight_VD.data_ptr()
    save_drafter(drafter, tmp_path / "e", provenance=provenance(target))
    again, _ = loaded(tmp_path / "e", target, num_tokens=36)
    assert torch.equal(draft_logits(again), draft_logits(drafter))


def test_a_map_loses_only_what_cannot_be_proposed(tmp_path):
    """UC-075, UC-077: with a draft vocabulary the other tokens keep their rows."""
    target = ToyTarget.toy()
    drafter = toy_drafter(d2t_S=D2T_S, draft_vocab_size=5)
    save_drafter(drafter, tmp_path / "d", provenance=provenance(target))
    again, _ = loaded(tmp_path / "d", target, num_tokens=36)
    assert again.d2t_S is not None
    assert again.d2t_S.tolist() == [7, 0, 12, 30]
    kept = draft_logits(drafter)[:, [0, 1, 3, 4]]
    torch.testing.assert_close(
        draft_logits(again), kept
    )  # a product of fewer columns may round otherwise


def test_another_tokenizer_is_refused(tmp_path):
    """UC-074: padding explains missing rows only up to the tokenizer's size."""
    exported(tmp_path / "d", flat(), toy_drafter().state_dict())
    with pytest.raises(ModelError, match="a tokenizer of 50 tokens"):
        loaded(tmp_path / "d", padded_target(64), num_tokens=50)


# Files of others


def test_a_deepspec_directory_with_redundant_tables_shares_them_with_the_target(tmp_path):
    """deepspec.md section 9: the stored tables are exact copies, in whatever dtype is loaded."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    coarse = ToyTarget(
        target.embed_weight_VD.to(torch.bfloat16).float(),
        target.head_weight_VD.to(torch.bfloat16).float(),
    )
    state |= {
        "embed_tokens.weight": coarse.embed_weight_VD.to(torch.bfloat16),
        "lm_head.weight": coarse.head_weight_VD.to(torch.bfloat16),
    }
    exported(tmp_path / "d", flat(), state)
    drafter, findings = loaded(tmp_path / "d", coarse)
    assert len(findings) == 1  # the layout
    assert drafter.embed_weight_VD is coarse.embed_weight_VD


def test_shards_are_read_by_their_index(tmp_path):
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    exported(tmp_path, flat(), {})
    (tmp_path / "model.safetensors").unlink()
    index = {}
    for part, names in enumerate((list(state)[:9], list(state)[9:])):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: state[name] for name in names}, tmp_path / file)
        index |= dict.fromkeys(names, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    drafter, _ = loaded(tmp_path, target)
    assert torch.equal(draft_logits(drafter), draft_logits(toy_drafter()))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors does not exist"):
        loaded(tmp_path, target)


def test_a_tied_file_uses_its_embedding_as_head(tmp_path):
    """UC-080."""
    target, state = ToyTarget.toy(), toy_drafter().state_dict()
    own = torch.randn(40, 32)
    document = flat(tie_word_embeddings=True)
    exported(tmp_path / "d", document, state | {"embed_tokens.weight": own})
    drafter, _ = loaded(tmp_path / "d", target)
    assert torch.equal(drafter.head_weight_SD, own)


def test_the_fingerprint_tells_targets_apart_and_not_their_dtype():
    weight = torch.randn(200, 32)
    assert target_fingerprint(weight) == target_fingerprint(weight.to(torch.bfloat16))
    assert target_fingerprint(weight) != target_fingerprint(torch.randn(200, 32))


def test_mixed_dtypes_become_that_of_the_norms(tmp_path):
    """vLLM keeps the confidence head in float32 beside bfloat16 layers."""
    drafter = toy_drafter().to(torch.bfloat16)
    target, state = ToyTarget.toy(), drafter.state_dict()
    state["confidence_head.proj.weight"] = state["confidence_head.proj.weight"].float()
    exported(tmp_path / "d", flat(), state)
    again, _ = loaded(tmp_path / "d", target)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
