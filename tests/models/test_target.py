"""Targets of many families, tiny and random, against plain transformers."""

import copy
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dspark.core import AttentionLayout
from dspark.errors import ModelError
from dspark.kernels import extension
from dspark.kernels.linear import replace_linears
from dspark.models.attention import KVPages
from dspark.models.target import Target
from dspark.models.target_source import resolve_source

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8}),
    "gemma2-softcap": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3-window": (
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    ),
    "gpt-oss-sinks": (
        "GptOssConfig",
        {
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "granite-scaled-head": ("GraniteConfig", {"logits_scaling": 4.0}),
    "cohere2-scaled-head": ("Cohere2Config", {"sliding_window": 8, "logit_scale": 0.25}),
}
IDS = torch.tensor([1, 5, 9, 30, 7, 8, 60, 61, 2, 3, 4, 44, 45, 46, 47, 48, 49, 50, 51, 10])


def config_of(family: str) -> Any:
    name, changes = FAMILIES[family]
    return getattr(transformers, name)(**{**SIZES, **changes})


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def step_layout(tables: list[list[int]], runs: list[tuple[int, int]], page_size: int) -> Any:
    """Causal layout of runs (start, count), one for each row of the block tables."""
    table = torch.tensor(tables, dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + count) for start, count in runs])
    rows = torch.cat([torch.full((count,), r) for r, (_, count) in enumerate(runs)])
    starts = torch.tensor([0, *(count for _, count in runs)]).cumsum(0)
    return AttentionLayout(
        block_tables_RP=table,
        query_starts_R1=starts.int(),
        visible_N=(positions + 1).int(),
        positions_N=positions,
        slots_N=table[rows, positions // page_size].long() * page_size + positions % page_size,
        max_visible=int(positions.max()) + 1,
    )


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_and_taps_equal_plain_transformers(family: str) -> None:
    plain = random_model(config_of(family))
    expected = plain(IDS[None], output_hidden_states=True)
    target = Target.wrap(copy.deepcopy(plain), name=family)
    num_layers = target.spec.num_layers
    output = target.states([IDS], tap_layers=(-1, 0, 2, num_layers))
    assert relative_error(target.logits(output.hidden_ND), expected.logits[0]) < 1e-4
    wanted = [expected.hidden_states[i + 1][0] for i in (-1, 0, 2)]
    taps = torch.cat([*wanted, expected.hidden_states[-1][0]], dim=-1)  # the last one is normed
    assert relative_error(output.taps_NM, taps) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_ragged_steps_over_pages_equal_one_whole_pass(family: str) -> None:
    """Positions, windows and masks of a verify window are those of one-token decoding (UC-020)."""
    target = Target.wrap(random_model(config_of(family)), name=family)
    first, second = IDS, IDS.flip(0)
    whole = target.logits(target.states([first, second], tap_layers=()).hidden_ND)
    pages = target.allocate_pages(num_pages=12, page_size=4)
    tables = [[3, 1, 7, 2, 9], [4, 5, 6, 8, 10]]
    found_first, found_second = [], []
    cuts = [(0, 7, 11), (7, 1, 4), (8, 3, 1), (11, 9, 4)]
    at_second = 0
    for start, count, count_second in cuts:
        ids = torch.cat(
            [first[start : start + count], second[at_second : at_second + count_second]]
        )
        layout = step_layout(tables, [(start, count), (at_second, count_second)], page_size=4)
        hidden = target.forward(ids, layout=layout, pages=pages, tap_layers=()).hidden_ND
        logits = target.logits(hidden)
        found_first.append(logits[:count])
        found_second.append(logits[count:])
        at_second += count_second
    found = torch.cat([*found_first, *found_second])
    assert relative_error(found, whole) < 1e-4


@torch.no_grad()
def test_rejected_tokens_leave_no_trace_when_their_positions_are_written_again() -> None:
    """A window of 8 wraps while drafts are rejected (UC-055)."""
    target = Target.wrap(random_model(config_of("gemma3-window")))
    whole = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    pages = target.allocate_pages(num_pages=12, page_size=4)
    table, found = [[1, 2, 3, 4, 5, 6]], []
    for start in range(0, 20, 2):
        wrong = torch.tensor([90, 91, 92])
        ids = torch.cat([IDS[start : start + 2], wrong])
        layout = step_layout(table, [(start, 5)], page_size=4)
        hidden = target.forward(ids, layout=layout, pages=pages, tap_layers=()).hidden_ND
        found.append(target.logits(hidden[:2]))
    assert relative_error(torch.cat(found), whole) < 1e-4


@torch.no_grad()
def test_packed_linears_change_the_logits_by_rounding_only() -> None:
    plain = random_model(config_of("llama-tied"))
    target = Target.wrap(copy.deepcopy(plain))
    replace_linears(target.model)
    found = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    assert relative_error(found, plain(IDS[None]).logits[0]) < 1e-4


@torch.no_grad()
def test_compiled_layers_equal_eager_ones() -> None:
    target = Target.wrap(random_model(config_of("qwen3")))
    eager = target.states([IDS, IDS[:5]], tap_layers=(1,))
    target.compile()
    compiled = target.states([IDS, IDS[:5]], tap_layers=(1,))
    assert relative_error(compiled.hidden_ND, eager.hidden_ND) < 1e-4
    assert relative_error(compiled.taps_NM, eager.taps_NM) < 1e-4


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "Qwen3NextConfig",
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            r"linear_attention.*cannot be rolled back",
        ),
        ("MambaConfig", {}, r"mamba has layers of kind \['linear_attention'\].*cannot be rolled"),
        # each layer attends and has a state besides
        ("FalconH1Config", {}, r"falcon_h1 has layers of kind \['hybrid'\].*cannot be rolled"),
        ("RwkvConfig", {}, "rwkv has no list of decoder layers"),
    ],
)
def test_a_target_with_state_that_cannot_roll_back_is_refused_by_name(
    family: str, changes: dict[str, Any], words: str
) -> None:
    """UC-054: never silent."""
    config = getattr(transformers, family)(**{**SIZES, **changes})
    with pytest.raises(ModelError, match=words):
        Target.wrap(AutoModelForCausalLM.from_config(config))


class _Recurrent(nn.Module):
    """In place of attention; no configuration tells of it."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states.cumsum(1), None


def test_a_layer_that_does_not_attend_is_found_where_no_configuration_tells_of_it() -> None:
    model = random_model(config_of("llama"))
    model.model.layers[1].self_attn = _Recurrent()
    with pytest.raises(ModelError, match=r"attends in \d of its \d layers.*cannot be rolled back"):
        Target.wrap(model)


def test_a_bidirectional_target_is_refused() -> None:
    config = transformers.Gemma3TextConfig(**{**SIZES, "use_bidirectional_attention": True})
    with pytest.raises(ModelError, match="not causal"):
        Target.wrap(AutoModelForCausalLM.from_config(config))


def test_a_head_that_is_not_understood_is_refused() -> None:
    class ShiftedHead(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 5.0 * torch.arange(output.logits.shape[-1])
            return output

    with pytest.raises(ModelError, match="changes its logits after the LM head"):
        Target.wrap(ShiftedHead(LlamaConfig(**SIZES)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/model", "does not exist"),
        ("/nowhere/model.gguf", "does not exist"),
        ("./nothing-here", "does not exist"),
        (__file__, "is a file, but not a .gguf; give a directory"),
    ],
)
def test_a_missing_target_is_one_clear_sentence(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_source(source)


def test_an_adapter_is_refused_and_not_applied_in_silence(tmp_path: Any) -> None:
    """UC-159: with the model's own files beside it, or alone."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds an adapter.*merge it"):
        resolve_source(tmp_path)
    random_model(config_of("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds an adapter.*merge it"):
        Target.load(tmp_path, dtype=torch.float32)


def test_a_directory_without_a_config_is_one_clear_sentence(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_source(tmp_path)


def test_a_saved_model_loads_from_its_directory(tmp_path: Any) -> None:
    model = random_model(config_of("llama"))
    model.save_pretrained(tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    found = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    assert relative_error(found, expected) < 1e-4
    assert target.spec.eos_ids == (2,)
    assert target.spec.max_positions == 256


def test_damaged_weights_are_one_clear_sentence(tmp_path: Any) -> None:
    random_model(config_of("llama")).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        Target.load(tmp_path, dtype=torch.float32)


def test_missing_weights_are_refused_by_name_not_filled_with_random_numbers(tmp_path: Any) -> None:
    """A drafter's directory names an architecture that transformers knows."""
    random_model(config_of("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.2\.mlp\.up_proj"):
        Target.load(tmp_path, dtype=torch.float32)


def test_pages_take_the_memory_they_say() -> None:
    target = Target.wrap(random_model(config_of("qwen3")))
    pages: KVPages = target.allocate_pages(num_pages=3, page_size=4)
    assert [tuple(k.shape) for k in pages.keys] == [(3, 2, 4, 8)] * 4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fused_layers_equal_plain_transformers(family: str) -> None:
    plain = random_model(config_of(family))
    target = Target.wrap(copy.deepcopy(plain), name=family)
    num_fused = target.fuse()
    assert num_fused == (0 if family.startswith(("gemma", "gpt-oss", "cohere2")) else 4)
    expected = plain(IDS[None]).logits[0]
    piecewise = copy.deepcopy(target)
    replace_linears(piecewise.model)
    found = piecewise.logits(piecewise.states([IDS], tap_layers=()).hidden_ND)
    assert relative_error(found, expected) < 1e-4
    target.pack()
    assert (target._stack is not None) == (num_fused == 4 and extension.IS_LOADED)
    joined = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    assert torch.equal(joined, found) or not num_fused
    assert relative_error(joined, expected) < 1e-4


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_all_layers_in_one_call_have_the_bits_of_each_by_itself(
    dtype: torch.dtype, quantization: str | None
) -> None:
    target = Target.wrap(random_model(config_of("qwen3")).to(dtype))
    target.fuse()
    target.pack(quantization=quantization)
    taps = (2, -1, 0, 3, 4)
    together = target.states([IDS, IDS[:3]], tap_layers=taps)
    stack, target._stack = target._stack, None
    assert (stack is not None) == extension.IS_LOADED
    one_by_one = target.states([IDS, IDS[:3]], tap_layers=taps)
    assert torch.equal(together.hidden_ND, one_by_one.hidden_ND)
    assert torch.equal(together.taps_NM, one_by_one.taps_NM)
    assert torch.equal(together.taps_NM[:, -together.hidden_ND.shape[1] :], together.hidden_ND)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_int8_keys_and_values_change_little(family: str) -> None:
    """At most tokens: one whose experts are nearly tied may get others."""
    target = Target.wrap(random_model(config_of(family)), name=family)
    expected = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    target.kv_dtype = torch.int8
    found = target.logits(target.states([IDS], tap_layers=()).hidden_ND)
    errors_N = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < float(errors_N.median()) < 0.02


@torch.no_grad()
def test_with_int8_keys_and_values_layers_in_one_call_have_the_bits_of_each_by_itself() -> None:
    target = Target.wrap(random_model(config_of("qwen3")).to(torch.bfloat16))
    target.fuse()
    target.pack(quantization="int8", kv_dtype=torch.int8)
    together = target.states([IDS, IDS[:3]], tap_layers=(2,))
    stack, target._stack = target._stack, None
    assert (stack is not None) == extension.IS_LOADED
    one_by_one = target.states([IDS, IDS[:3]], tap_layers=(2,))
    assert torch.equal(together.hidden_ND, one_by_one.hidden_ND)
    assert torch.equal(together.taps_NM, one_by_one.taps_NM)


@torch.no_grad()
def test_a_final_norm_that_computes_otherwise_keeps_the_layers_apart() -> None:
    plain = random_model(config_of("llama"))
    forward = plain.model.norm.forward
    plain.model.norm.forward = lambda x: forward(x).flip(-1)
    target = Target.wrap(plain)
    expected = target.states([IDS], tap_layers=()).hidden_ND
    assert target.fuse() == 4
    target.pack()
    assert target._stack is None
    found = target.states([IDS], tap_layers=()).hidden_ND
    assert relative_error(found, expected) < 1e-4


@torch.no_grad()
def test_a_layer_that_fits_the_pattern_but_computes_otherwise_is_not_fused() -> None:
    """A layer without rotation looks the same from outside; its output tells."""
    plain = random_model(config_of("llama"))
    target = Target.wrap(plain)
    forward = target._layers[1].forward

    def without_rotation(hidden: Any, *, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        tables = (torch.ones_like(cos), torch.zeros_like(sin))
        return forward(hidden, position_embeddings=tables, **kwargs)

    target._layers[1].forward = without_rotation
    expected = target.states([IDS], tap_layers=()).hidden_ND
    assert target.fuse() == 3
    found = target.states([IDS], tap_layers=()).hidden_ND
    assert relative_error(found, expected) < 1e-4
