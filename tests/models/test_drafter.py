"""The backbone: positions, masks, rotary tables, windows, vocabulary and its own configuration."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model, Qwen3RotaryEmbedding

from dspark.errors import ModelError
from dspark.models.drafter import Drafter
from dspark.models.drafter_config import default_target_layer_ids
from dspark.models.packed_attention import PackedBlocks, packed_attention
from dspark.models.rotary import Rotary
from tests.models.toy_drafters import (
    CONFIG,
    dense_block_attention,
    random_taps,
    serve_block,
    toy_drafter,
)

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
HEADS = pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])


def head_changes(head: str) -> dict:
    return {"markov_rank": 0} if head == "none" else {"markov_head_type": head}


@HEADS
def test_training_logits_equal_serving_logits(head):
    """UC-063, UC-072, UC-086, UC-092: anchors 1, 2, mid and last, for every head."""
    drafter = toy_drafter(**head_changes(head))
    length, anchors = 11, torch.tensor([1, 2, 5, 11])
    taps_TM = random_taps(drafter, length)
    blocks = PackedBlocks(
        context_lengths=[length], num_blocks=[4], anchors_A=anchors, block_size=CONFIG.block_size
    )
    context_kv = drafter.context_kv(drafter.context(taps_TM), blocks.context_positions_T)
    attend = packed_attention(context_kv, blocks, windows=drafter.config.windows)
    anchor_ids = torch.tensor([3, 9, 27, 1])
    prev_ids_RK = torch.cat((anchor_ids[:, None], torch.randint(40, (4, 3))), dim=1)

    hidden_ND = drafter.backbone(drafter.block_inputs(anchor_ids), blocks.positions_N, attend)
    hidden_RKD = hidden_ND.view(4, CONFIG.block_size, -1)
    trained_RKS = drafter.base_logits(hidden_RKD)
    if drafter.markov_head is not None:
        trained_RKS = trained_RKS + drafter.markov_head.unroll(prev_ids_RK, hidden_RKD)

    for row, anchor in enumerate(anchors.tolist()):
        served_KD = serve_block(drafter, taps_TM, int(anchor_ids[row]), anchor)
        served_KS = served_logits(drafter, served_KD, prev_ids_RK[row])
        torch.testing.assert_close(trained_RKS[row], served_KS, rtol=1e-4, atol=1e-4)


def served_logits(drafter: Drafter, hidden_KD, prev_ids_K):
    logits_KS = drafter.base_logits(hidden_KD)
    head = drafter.markov_head
    if head is None:
        return logits_KS
    state, rows = head.initial_state(1), []
    for slot, token in enumerate(prev_ids_K):
        bias_RS, state = head.step(head.embed(token[None]), hidden_KD[slot : slot + 1], state)
        rows.append(logits_KS[slot] + bias_RS[0])
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("anchor", [0, 7])
def test_the_layers_compute_what_the_librarys_qwen3_layers_compute(anchor):
    """An independent reading of the layers: same tensor names, its cache holds our context."""
    drafter = toy_drafter()
    config = drafter.config
    library = Qwen3Model(
        Qwen3Config(
            vocab_size=1,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attn_implementation="eager",
        )
    )
    names = ("layers.", "norm.")
    state = {n: t for n, t in drafter.state_dict().items() if n.startswith(names)}
    missing, unexpected = library.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], [])

    taps_TM = random_taps(drafter, anchor)
    cache = DynamicCache()
    context_kv = drafter.context_kv(drafter.context(taps_TM), torch.arange(anchor))
    for layer, (k_NGE, v_NGE) in enumerate(context_kv):
        if anchor:
            cache.update(k_NGE.transpose(0, 1)[None], v_NGE.transpose(0, 1)[None], layer)
    x_KD = drafter.block_inputs(torch.tensor([3]))
    with torch.no_grad():
        expected = library(
            inputs_embeds=x_KD[None],
            position_ids=anchor + torch.arange(4)[None],
            attention_mask={"full_attention": torch.zeros(1, 1, 4, anchor + 4)},
            past_key_values=cache,
        )
        served_KD = serve_block(drafter, taps_TM, 3, anchor)
    torch.testing.assert_close(served_KD, expected.last_hidden_state[0], rtol=1e-4, atol=1e-5)


def test_packing_for_serving_keeps_the_logits():
    """The packed products stand in for `nn.Linear` and for the shared LM head."""
    for changes in ({}, {"draft_vocab_size": 4, "d2t_S": torch.tensor([7, 0, 39, 12])}):
        drafter = toy_drafter(**changes)
        taps_TM = random_taps(drafter, 6)
        with torch.inference_mode():
            hidden_KD = serve_block(drafter, taps_TM, 3, 6)
            logits_KS = served_logits(drafter, hidden_KD, torch.tensor([3, 1, 2, 3]))
            drafter.pack()
            packed_KD = serve_block(drafter, taps_TM, 3, 6)
            packed_KS = served_logits(drafter, packed_KD, torch.tensor([3, 1, 2, 3]))
        torch.testing.assert_close(packed_KS, logits_KS, rtol=1e-4, atol=1e-4)


def test_the_target_can_lend_its_packed_head():
    drafter = toy_drafter()
    drafter.pack(head=lambda hidden_ND: hidden_ND @ drafter.head_weight_SD.T)
    hidden_ND = torch.randn(3, 32)
    expected = hidden_ND @ drafter.head_weight_SD.T
    assert torch.equal(drafter.base_logits(hidden_ND), expected)


def test_a_warm_cache_gives_the_same_keys_and_values():
    """UC-063, UC-051: context fed in pieces equals context fed at once."""
    drafter = toy_drafter()
    taps_TM = random_taps(drafter, 9)
    whole = drafter.context_kv(drafter.context(taps_TM), torch.arange(9))
    pieces = [
        drafter.context_kv(drafter.context(taps_TM[a:b]), torch.arange(a, b))
        for a, b in ((0, 5), (5, 6), (6, 9))
    ]
    for layer, pair in enumerate(whole):
        for index, tensor in enumerate(pair):
            joined = torch.cat([piece[layer][index] for piece in pieces])
            torch.testing.assert_close(joined, tensor, rtol=1e-5, atol=1e-6)


def test_slots_see_each_other_and_the_context_but_not_the_anchors_own_taps():
    drafter = toy_drafter()
    taps_TM, anchor = random_taps(drafter, 8), 6
    hidden_KD = serve_block(drafter, taps_TM, 3, anchor)
    later = taps_TM.clone()
    later[anchor:] += 1
    assert torch.equal(serve_block(drafter, later, 3, anchor), hidden_KD)
    earlier = taps_TM.clone()
    earlier[anchor - 1] += 1
    assert bool((serve_block(drafter, earlier, 3, anchor) != hidden_KD).any(dim=1).all())
    assert bool((serve_block(drafter, taps_TM, 4, anchor) != hidden_KD).any(dim=1).all())


@pytest.mark.parametrize(("windows", "reads"), [((4, 4), False), ((4, None), True)])
def test_a_window_hides_older_context_in_its_layer_only(windows, reads):
    """UC-070: a change older than the windows of ALL layers is unseen, one full layer sees it."""
    drafter = toy_drafter(layer_windows=windows)
    taps_TM, anchor = random_taps(drafter, 16), 12
    changed = taps_TM.clone()
    changed[: anchor - 4] += 1  # slot 0 reads positions 9.. with a window of 4
    is_changed = not torch.equal(
        serve_block(drafter, taps_TM, 3, anchor), serve_block(drafter, changed, 3, anchor)
    )
    assert is_changed == reads


@pytest.mark.parametrize("name", list(SCALINGS))
def test_rotary_tables_equal_those_of_the_library(name):
    """UC-068: null, linear, yarn and llama3."""
    scaling = SCALINGS[name]
    config = Qwen3Config(
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 1e4, **(scaling or {"rope_type": "default"})},
    )
    positions_N = torch.arange(128)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions_N[None])
    rotary = Rotary(
        head_dim=8,
        theta=1e4,
        scaling=scaling,
        max_position_embeddings=128,
        device=torch.device("cpu"),
    )
    ours = rotary.angles(positions_N)
    torch.testing.assert_close((ours[0][:, 0], ours[1][:, 0]), (cos[0], sin[0]))


def test_an_unknown_rope_type_is_refused_by_name():
    """UC-068."""
    with pytest.raises(ModelError, match="rope_type is 'foo'"):
        replace(CONFIG, rope_scaling={"rope_type": "foo"})


def test_a_missing_rope_parameter_is_refused_by_name():
    with pytest.raises(ModelError, match="'llama3' needs the parameter"):
        toy_drafter(rope_scaling={"rope_type": "llama3", "factor": 8.0})


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3"])
def test_rope_parameters_without_finite_angles_are_refused(name):
    with pytest.raises(ModelError, match="no finite frequencies"):
        toy_drafter(rope_scaling={**SCALINGS[name], "factor": 0.0})


def test_casting_the_module_leaves_the_angles_in_float32():
    """DeepSpec's trainer loses them to bf16: deepspec.md section 7.3, first bug."""
    drafter = toy_drafter()
    positions_N = torch.tensor([0, 1, 4000])
    before = drafter.rotary.angles(positions_N)
    drafter.to(torch.bfloat16)
    after = drafter.rotary.angles(positions_N)
    assert after[0].dtype is torch.float32
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_positions_beyond_the_trained_context_still_draft():
    """UC-065: no table ends, so the target's context limits the text and not the drafter's."""
    drafter = toy_drafter()
    anchor = CONFIG.max_position_embeddings + 30
    hidden_KD = serve_block(drafter, random_taps(drafter, anchor), 3, anchor)
    assert bool(hidden_KD.isfinite().all())


def test_scores_depend_on_distance_and_not_on_absolute_position():
    drafter = toy_drafter()
    taps_TM = random_taps(drafter, 6)
    ctx_ND = drafter.context(taps_TM)
    hidden = []
    for shift in (0, 17):
        context_kv = drafter.context_kv(ctx_ND, torch.arange(6) + shift)
        attend = dense_block_attention(context_kv, anchor=6, windows=(None, None))
        x_ND = drafter.block_inputs(torch.tensor([3]))
        hidden.append(drafter.backbone(x_ND, torch.arange(4) + 6 + shift, attend))
    torch.testing.assert_close(hidden[0], hidden[1], rtol=1e-4, atol=1e-5)


def test_block_inputs_are_the_anchor_and_then_masks():
    drafter = toy_drafter()
    ids = torch.tensor([[5, 39, 39, 39], [39, 39, 39, 39], [0, 39, 39, 39]])
    expected = drafter.embed_weight_VD[ids].flatten(0, 1)
    assert torch.equal(drafter.block_inputs(torch.tensor([5, 39, 0])), expected)


def test_a_draft_vocabulary_gathers_the_rows_of_its_target_ids():
    """UC-076, UC-078: column s of the logits belongs to target id d2t[s]."""
    d2t_S = torch.tensor([7, 0, 39, 12])
    full, reduced = toy_drafter(), toy_drafter(d2t_S=d2t_S, draft_vocab_size=4)
    hidden_ND = torch.randn(3, 32)
    torch.testing.assert_close(
        reduced.base_logits(hidden_ND), full.base_logits(hidden_ND)[:, d2t_S]
    )
    assert reduced.markov_head is not None
    assert reduced.markov_head.markov_w1.weight.shape == (40, 6)
    assert reduced.markov_head.markov_w2.weight.shape == (4, 6)


def test_a_prefix_of_the_vocabulary_shares_the_targets_memory():
    drafter = toy_drafter(d2t_S=torch.arange(30), draft_vocab_size=30)
    full = torch.randn(40, 32)
    shared = Drafter(
        drafter.config, embed_weight_VD=full, head_weight_VD=full, d2t_S=torch.arange(30)
    )
    assert shared.head_weight_SD.data_ptr() == full.data_ptr()


@pytest.mark.parametrize(
    "d2t_S", [None, torch.zeros(4, dtype=torch.int64), torch.tensor([1, 2, 3, 40]), torch.arange(3)]
)
def test_a_missing_or_invalid_map_is_refused(d2t_S):
    """UC-076."""
    with pytest.raises(ModelError, match="d2t"):
        toy_drafter(d2t_S=d2t_S, draft_vocab_size=4)


def test_embedding_and_head_are_shared_and_not_saved():
    drafter = toy_drafter()
    assert not {"embed_tokens.weight", "lm_head.weight"} & drafter.state_dict().keys()
    assert not any(p is drafter.embed_weight_VD for p in drafter.parameters())


def test_new_weights_follow_their_generator_and_nothing_else():
    torch.manual_seed(0)
    first = toy_drafter(5)
    state = torch.random.get_rng_state()
    second = toy_drafter(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    third = toy_drafter(6)
    assert not torch.equal(first.fc.weight, third.fc.weight)


def test_new_weights_have_the_published_spread():
    weight = torch.randn(64, 256)
    drafter = Drafter(
        replace(CONFIG, vocab_size=64, hidden_size=256),
        embed_weight_VD=weight,
        head_weight_VD=weight,
        generator=torch.Generator().manual_seed(0),
    )
    assert abs(drafter.fc.weight.std().item() - 0.02) < 5e-4
    assert bool((drafter.norm.weight == 1).all())
    assert drafter.confidence_head is not None
    assert drafter.confidence_head.proj.bias.item() == 0.0


def test_plain_dflash_needs_no_other_flag():
    """UC-086: rank 0 with every other default resolves; asking for Markov input is refused."""
    config = replace(CONFIG, markov_rank=0, confidence_head_with_markov=None)
    assert config.confidence_head_with_markov is False
    with pytest.raises(ModelError, match="confidence_head_with_markov is True"):
        replace(CONFIG, markov_rank=0, confidence_head_with_markov=True)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"target_layer_ids": (1, 1)}, "target_layer_ids"),
        ({"target_layer_ids": (0, 4)}, "target_layer_ids"),
        ({"target_layer_ids": (-2, 0)}, "target_layer_ids"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"markov_head_type": "gru"}, "markov_head_type"),
        ({"layer_windows": (4,)}, "layer_windows"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_key(changes, key):
    with pytest.raises(ModelError, match=f"drafter's {key} is"):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 28])
def test_default_layer_ids_fit_small_targets(num_layers):
    """UC-089."""
    ids = default_target_layer_ids(num_layers)
    assert len(set(ids)) == len(ids) >= 1
    assert set(ids) <= set(range(num_layers))
    replace(CONFIG, num_target_layers=num_layers, target_layer_ids=ids)
    assert default_target_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(40) == (1, 10, 19, 28, 37)
