"""EAGLE-3 and MTP files of several exporters: what parses alike, and what is refused."""

import json
from typing import Any

import pytest

from dspark.errors import ModelError
from dspark.models.config_spellings import parse_config
from dspark.models.drafter_config import DrafterKind
from dspark.models.drafter_format import Provenance, VocabularyMap, config_document
from tests.models.test_chain import chain_config, published_document

PROVENANCE = Provenance(
    target_name="toy", target_fingerprint="00ff", target_dtype="float32", template_hash=None
)
LLAMA = chain_config(has_head_norms=False, draft_vocab_size=10)


def original() -> dict[str, Any]:
    """The authors' files carry the target's class name."""
    return published_document(architectures=["LlamaForCausalLM"], head_dim=8)


def deepspec() -> dict[str, Any]:
    return published_document(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        draft_vocab_size=...,
        draft_num_hidden_layers=1,
        step_loss_decay=0.8,
        target_model_name_or_path="toy",
        num_target_layers=4,
    )


def speculators(**changes: Any) -> dict[str, Any]:
    own = ("target_layer_ids", "ttt_length", "architectures", "draft_vocab_size")
    layer = {key: value for key, value in published_document().items() if key not in own}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": 10,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        **changes,
    }


def our_own(config: Any) -> dict[str, Any]:
    document = config_document(config, dtype="float32", provenance=PROVENANCE)
    return dict(json.loads(json.dumps(document)))


@pytest.mark.parametrize(
    "document", [published_document(), original(), speculators(), our_own(LLAMA)]
)
def test_spellings_of_one_eagle3_drafter_parse_alike(document: dict[str, Any]) -> None:
    """UC-083, UC-088."""
    parsed = parse_config(document, num_target_layers=4)
    assert parsed.config == LLAMA
    assert parsed.findings == ()


@pytest.mark.parametrize(
    "config",
    [
        chain_config(),
        chain_config(draft_vocab_size=12, has_normed_residual=True, layer_windows=(6,)),
        chain_config(DrafterKind.MTP, block_size=1),
        chain_config(DrafterKind.MTP, block_size=3, target_layer_ids=(3,)),
    ],
)
def test_what_we_write_is_what_we_read(config: Any) -> None:
    parsed = parse_config(our_own(config))
    assert (parsed.config, parsed.findings) == (config, ())
    assert parsed.vocabulary_map is VocabularyMap.TARGET_IDS


def test_deepspecs_files_have_norms_per_head_and_the_whole_vocabulary() -> None:
    parsed = parse_config(deepspec())
    assert parsed.config == chain_config()
    assert parsed.findings == ()
    parsed = parse_config(published_document(), num_target_layers=4)
    assert parsed.vocabulary_map is VocabularyMap.OFFSETS


def test_layers_of_speculators_are_norm_free_unless_they_are_qwens() -> None:
    document = speculators()
    document["transformer_layer_config"]["model_type"] = "qwen3"
    assert parse_config(document, num_target_layers=4).config.has_head_norms


def test_what_a_file_leaves_out_is_assumed_aloud() -> None:
    """UC-088, UC-090: the usual three layers of a target, and five tokens."""
    document = published_document(target_layer_ids=..., ttt_length=...)
    parsed = parse_config(document, num_target_layers=32)
    assert parsed.config.target_layer_ids == (1, 15, 28)
    assert parsed.config.block_size == 5
    assert [finding[:30] for finding in parsed.findings] == [
        "config.json does not say how m",
        "config.json does not name the ",
    ]
    document["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 31],
        "use_aux_hidden_state": True,
    }
    parsed = parse_config(document, num_target_layers=32)
    assert parsed.config.target_layer_ids == (2, 30, 31)
    assert "counted from 0" in parsed.findings[1]
    with pytest.raises(ModelError, match="write target_layer_ids"):
        parse_config(published_document(target_layer_ids=...), num_target_layers=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": True}, "norm_output is True, a variant"),
        ({"fc_norm": True}, "fc_norm is True, a variant"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but a chain has 1 layer"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_theta": ...}, "has no rope_theta"),
        ({"hidden_size": ...}, "no head_dim, hidden_size or num_attention_heads"),
        ({"target_layer_ids": [0, 4]}, "rise strictly within -1..3"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64"),
        ({"ttt_length": 0}, "block_size is 0"),
        ({"draft_vocab_size": 41}, "draft_vocab_size is 41"),
    ],
)
def test_what_would_be_drafted_wrongly_is_refused(changes: dict[str, Any], message: str) -> None:
    """UC-082, UC-067: by name, before any weight is read."""
    with pytest.raises(ModelError, match=message):
        parse_config(published_document(**changes), num_target_layers=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 4}, "markov_rank is 4, but it must be 0"),
        ({"enable_confidence_head": True}, "enable_confidence_head is True, but it must be False"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but it must be 1"),
        ({"kind": DrafterKind.MTP, "target_layer_ids": (1, 4)}, "name one layer for mtp"),
        ({"kind": DrafterKind.DSPARK, "target_layer_ids": (1,)}, "mask_token_id is None"),
        (
            {
                "kind": DrafterKind.DSPARK,
                "target_layer_ids": (1,),
                "mask_token_id": 1,
                "has_head_norms": False,
            },
            "has_head_norms is False",
        ),
    ],
)
def test_a_configuration_that_no_module_has_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        chain_config(**changes)
