"""One drafter, many config.json: what parses to the same thing, and what is refused."""

import contextlib
import json
from pathlib import Path

import pytest

from dspark.errors import ModelError
from dspark.models.config_spellings import parse_config
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_format import Provenance, VocabularyMap, config_document
from tests.models.toy_drafters import CONFIG

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/deepspec_qwen3_4b.json").read_text())
PROVENANCE = Provenance(
    target_name="toy", target_fingerprint="00ff", target_dtype="float32", template_hash=None
)


def flat(**changes) -> dict:
    """DeepSpec's spelling of the toy drafter; a change to `...` removes the key."""
    document = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "num_target_layers": 4,
        "target_layer_ids": [0, 1, 3],
        "block_size": 4,
        "mask_token_id": 39,
        "num_anchors": 512,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } | changes
    return {key: value for key, value in document.items() if value is not ...}


def section(document: dict, keys: list[str]) -> tuple[dict, dict]:
    """Moves `keys` out of a flat document: what is left, and what was moved."""
    moved = {key: document[key] for key in keys if key in document}
    return {key: value for key, value in document.items() if key not in moved}, moved


HEAD_KEYS = [
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
]
BODY_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "layer_types",
]


def older_rope() -> dict:
    return flat(rope_parameters=..., rope_theta=10000, rope_scaling=None, torch_dtype="bfloat16")


def specforge_one_section() -> dict:
    rest, moved = section(older_rope(), ["mask_token_id", "target_layer_ids", *HEAD_KEYS])
    moved |= {"projector_type": "dspark", "confidence_head_alpha": 1.0}
    return rest | {"architectures": ["DFlashDraftModel"], "dflash_config": moved}


def specforge_two_sections() -> dict:
    rest, moved = section(specforge_one_section()["dflash_config"], HEAD_KEYS)
    outer = specforge_one_section() | {"architectures": ["DSparkDraftModel"]}
    return outer | {"dflash_config": rest, "dspark_config": moved, "target_hidden_size": None}


def speculators() -> dict:
    rest, moved = section(flat(target_layer_ids=..., num_target_layers=...), BODY_KEYS)
    return rest | {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "toy"}},
        "transformer_layer_config": moved,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "sample_from_anchor": True,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
    }


def our_own() -> dict:
    document = config_document(CONFIG, dtype="float32", provenance=PROVENANCE)
    return json.loads(json.dumps(document))


SPELLINGS = [flat, older_rope, specforge_one_section, specforge_two_sections, speculators, our_own]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_six_spellings_parse_to_one_equal_configuration(spelling):
    """UC-083, UC-088: layer ids counted from the embedding are shifted to ours."""
    assert parse_config(spelling(), num_target_layers=4).config == CONFIG


def test_the_published_configuration_is_understood_completely():
    """UC-091: the documented config.json of the 4B drafter; only its layout is not stored."""
    parsed = parse_config(GOLDEN["config"])
    assert parsed.config == DrafterConfig(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        block_size=7,
        mask_token_id=151669,
    )
    (finding,) = parsed.findings
    assert "anchor-first is assumed" in finding


def test_what_we_write_has_every_key_that_deepspec_reads():
    """UC-091."""
    inherited = {"bos_token_id", "eos_token_id", "initializer_range", "use_cache"}
    assert set(GOLDEN["config"]) - inherited - {"max_window_layers"} <= set(our_own())
    assert our_own()["architectures"] == GOLDEN["config"]["architectures"]


def test_what_we_write_is_read_back_without_a_finding():
    """UC-081: layout and format version are always stored."""
    document = our_own()
    assert document["dspark"]["layout"] == "anchor-first"
    assert document["dspark"]["format_version"] == 1
    parsed = parse_config(document)
    assert parsed.findings == ()
    assert parsed.provenance == PROVENANCE


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_windows": (None, 8)},
        {"layer_windows": (6, 8)},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"enable_confidence_head": False, "confidence_head_with_markov": None},
        {"markov_head_type": "rnn"},
        {"draft_vocab_size": 16},
        {"attention_bias": True, "rms_norm_eps": 1e-5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_every_field_survives_a_round_trip(changes):
    """UC-070, UC-083, UC-086: windows per layer, ranks, maps and scaling."""
    config = DrafterConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__} | changes
    )
    document = json.loads(
        json.dumps(config_document(config, dtype="float32", provenance=PROVENANCE))
    )
    assert parse_config(document).config == config


@pytest.mark.parametrize(
    "document",
    [
        flat(),
        flat(rope_parameters=..., rope_theta=10000.0),
        flat(rope_theta=10000),
        flat(rope_parameters=..., rope_scaling={"rope_theta": 1e4, "type": "default"}),
    ],
)
def test_rope_base_is_found_where_it_is(document):
    """UC-067: nested only, top only, both equal."""
    assert parse_config(document).config.rope_theta == 1e4


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (flat(rope_theta=1e6), r"rope_theta as \[10000.0, 1000000.0\]"),
        (flat(rope_parameters=...), "has no rope_theta"),
        (flat(rope_parameters={"rope_type": "default"}), "has no rope_theta"),
    ],
)
def test_a_missing_or_contradictory_rope_base_is_refused(document, words):
    """UC-067: both different, neither."""
    with pytest.raises(ModelError, match=words):
        parse_config(document)


@pytest.mark.parametrize(
    ("scaling", "parsed"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_rope_scaling_is_read_from_either_key(scaling, parsed):
    """UC-068."""
    nested = flat(rope_parameters={"rope_theta": 1e4, **scaling})
    older = flat(rope_parameters=..., rope_theta=1e4, rope_scaling=scaling)
    assert parse_config(nested).config.rope_scaling == parsed
    assert parse_config(older).config.rope_scaling == parsed


def test_windows_are_read_per_layer():
    """UC-070: from layer_types, and from Qwen's older flags."""
    kinds = ["sliding_attention", "full_attention"]
    new = flat(layer_types=kinds, sliding_window=8, use_sliding_window=True)
    old = flat(layer_types=..., sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert parse_config(new).config.windows == (8, None)
    assert parse_config(old).config.windows == (None, 8)


@pytest.mark.parametrize(
    "document",
    [
        {"architectures": ["Gemma4Eagle3Model"], "model_type": "gemma4_text"},
        {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"},
        {"architectures": ["Qwen3_5MTPDraftModel"], "mtp_config": {"share_lm_head": True}},
        {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"},
        {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}},
        {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"projector_type": "domino"}},
        {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"model_type": "qwen3"},
    ],
)
def test_another_kind_of_drafter_is_named_and_refused(document):
    """UC-082, UC-092."""
    with pytest.raises(ModelError, match=r"config\.json describes .* but a drafter is expected"):
        parse_config(document)


def test_a_file_without_layout_warns_or_is_refused():
    """UC-081: DeepSpec has one layout; exporters of the nested form have two."""
    (finding,) = parse_config(flat()).findings
    assert "anchor-first is assumed" in finding
    document = speculators()
    del document["sample_from_anchor"]
    with pytest.raises(ModelError, match="lacks sample_from_anchor"):
        parse_config(document, num_target_layers=4)


@pytest.mark.parametrize("document", [flat(sample_from_anchor=False), speculators()])
def test_the_fill_in_layout_is_refused_by_name(document):
    """UC-081."""
    with pytest.raises(ModelError, match="layout is fill-in"):
        parse_config(document | {"sample_from_anchor": False}, num_target_layers=4)


def test_unknown_keys_are_reported():
    """UC-083."""
    document = our_own() | {"noise_schedule": "cosine", "dflash_config": None}
    document["dspark"]["colour"] = "red"
    document["rope_parameters"]["short_factor"] = 2.0
    (finding,) = parse_config(document).findings
    assert "rope_parameters.short_factor" in finding
    assert "noise_schedule" in finding
    assert "dspark.colour" in finding


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": ...}, "has no mask_token_id"),
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"block_size": "7"}, "block_size as '7'"),
        ({"block_size": ...}, "has no block_size"),
        ({"markov_rank": ...}, "has no markov_rank"),
        ({"num_target_layers": ...}, "has no num_target_layers"),
        ({"target_layer_ids": ...}, "has no target_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "which disagree"),
        ({"dflash_config": {"projector_type": "dspark", "block_size": 16}}, "block_size twice"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_interleave": True}, "rope_interleave is True"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"layer_types": "full_attention"}, "layer_types as 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"layer_types": ["full_attention"]}, "layer_windows is"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "rope_type is 'foo'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one rotary embedding"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"markov_head_type": "gru"}, "markov_head_type is 'gru'"),
        ({"markov_rank": 0}, "confidence_head_with_markov is True"),
        ({"dspark": {"format_version": 2}}, "format_version is 2"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}}
            | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "rope_scaling",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
            | {"sliding_window_non_causal": False},
            "sliding_window_non_causal is False",
        ),
    ],
)
def test_what_would_draft_wrongly_is_refused_by_key(changes, words):
    """UC-067, UC-068, UC-069, UC-070, UC-079, UC-083, UC-086, UC-088."""
    with pytest.raises(ModelError, match=words):
        parse_config(flat(**changes))


@pytest.mark.parametrize("role", ["pad_token_id", "eos_token_id", "bos_token_id"])
def test_a_mask_token_with_another_role_is_reported(role):
    """UC-079."""
    findings = parse_config(flat(**{role: [1, 39], "sample_from_anchor": True})).findings
    assert any(f"mask_token_id 39 is also its {role}" in finding for finding in findings)


def test_what_a_vocabulary_map_holds_depends_on_the_exporter():
    """UC-076: offsets with SpecForge and speculators, target ids in our files, unsaid in flat."""
    maps = [parse_config(spelling(), num_target_layers=4).vocabulary_map for spelling in SPELLINGS]
    offsets = VocabularyMap.OFFSETS
    assert maps == [None, None, offsets, offsets, offsets, VocabularyMap.TARGET_IDS]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("value", ["x", -1, 0, 3, 2.5, True, [1], ["a"], {"a": 1}])
def test_any_wrong_value_of_any_key_is_a_sentence_and_not_a_crash(spelling, value):
    """A damaged or foreign file ends in `ModelError`, whatever it holds."""
    for key, inside in spelling().items():
        nested = inside if isinstance(inside, dict) else {}
        for wrong in (value, *(nested | {name: value} for name in nested)):
            with contextlib.suppress(ModelError):
                parse_config(spelling() | {key: wrong}, num_target_layers=4)
