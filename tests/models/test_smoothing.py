"""Even inputs: the model stays what it was, and int8 loses less of it."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from dspark.kernels.linear import quantize
from dspark.models.smoothing import input_factors, metered, relative_energy
from dspark.models.target import Target
from tests.models.test_target import IDS, SIZES, config_of, random_model, relative_error

OUTLIER = 5


def with_outliers(config: Any) -> Any:
    """A random model in which one channel towers over the others behind every norm and gate."""
    model = random_model(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[OUTLIER] *= 40
            layer.post_attention_layernorm.weight[OUTLIER] *= 40
            layer.mlp.up_proj.weight[OUTLIER] *= 40
            for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.weight[:, OUTLIER] /= 40
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight[:, OUTLIER] /= 40
            layer.mlp.down_proj.weight[:, OUTLIER] /= 40
        model.model.norm.weight[OUTLIER] *= 40
        model.lm_head.weight[:, OUTLIER] /= 40
    return model


def logits_of(target: Target) -> torch.Tensor:
    return target.logits(target.states([IDS], tap_layers=()).hidden_ND).float()


@pytest.mark.parametrize(
    "config",
    [
        config_of("llama"),
        LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True),
        Qwen2Config(**SIZES),
        config_of("qwen3"),
        config_of("gemma2-softcap"),  # its layers stay as they are, its head does not
    ],
    ids=["llama", "llama-biases", "qwen2", "qwen3", "gemma2"],
)
def test_the_unquantised_model_computes_what_it_did_before(config: Any) -> None:
    target = Target.wrap(with_outliers(config))
    num_fused = target.fuse()
    expected = target.states([IDS], tap_layers=(0, 2))
    logits = target.logits(expected.hidden_ND)
    weight = target.head_weight_VD.clone()
    target._smooth()
    found = target.states([IDS], tap_layers=(0, 2))
    assert relative_error(found.taps_NM, expected.taps_NM) < 1e-4
    assert relative_error(found.hidden_ND, expected.hidden_ND) < 1e-4
    assert relative_error(target.logits(found.hidden_ND), logits) < 1e-4
    assert target._head_factors_D is not None
    assert target._head_factors_D[OUTLIER] > 2 * target._head_factors_D.median()
    assert torch.equal(target.head_weight_VD, weight)  # the drafter's and the embedding's
    if num_fused:
        assert target._layers[0].fused.norm_in.weight[OUTLIER].abs() < 20


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_loses_a_fraction_where_channels_tower_over_the_rest(
    family: str, dtype: torch.dtype
) -> None:
    plain = with_outliers(config_of(family)).to(dtype)
    exact = copy.deepcopy(plain).float()
    with torch.no_grad():
        expected = exact(IDS[None]).logits[0]
    errors = []
    for is_smoothed in (False, True):
        target = Target.wrap(copy.deepcopy(plain))
        assert target.fuse() == 4
        if not is_smoothed:
            target._smooth = lambda: None  # type: ignore[method-assign]
        target.pack(quantization="int8")
        errors.append(float((logits_of(target) - expected).square().mean().sqrt()))
    assert errors[1] < 0.5 * errors[0], errors


def test_even_inputs_do_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            target = Target.wrap(with_outliers(config_of("llama")).bfloat16())
            target.fuse()
            target.pack(quantization="int8")
            found.append(logits_of(target))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_factors_share_the_error_between_inputs_and_weights() -> None:
    """The optimum of the sum of both, against factors a little to either side of it."""
    generator = torch.Generator().manual_seed(0)
    sizes_I = torch.randn(64, generator=generator).exp()
    x_NI = torch.randn(256, 64, generator=generator) * sizes_I
    weight_OI = torch.randn(96, 64, generator=generator) * torch.randn(64, generator=generator)
    exact_NO = x_NI @ weight_OI.T
    factors_I = input_factors(relative_energy(x_NI), weight_OI)

    def error(power: float) -> float:
        (x, x_scale), (w, w_scale) = (
            quantize(x_NI / factors_I**power),
            quantize(weight_OI * factors_I**power),
        )
        product_NO = (x.float() * x_scale[:, None]) @ (w.float() * w_scale[:, None]).T
        return float((product_NO - exact_NO).square().mean().sqrt())

    assert error(1.0) < 0.9 * error(0.0)
    assert error(1.0) < min(error(0.5), error(1.5))


def test_a_channel_without_input_or_weight_keeps_its_scale() -> None:
    energy_I = torch.tensor([4.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    weight_OI = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    factors_I = input_factors(energy_I, weight_OI)
    assert factors_I.tolist() == pytest.approx([2**0.25, 1.0, 1.0, 2**-0.25])
    assert input_factors(torch.zeros(4).double(), weight_OI).tolist() == [1.0] * 4


@torch.no_grad()
def test_meters_leave_the_layers_as_they_were_and_count_what_went_in() -> None:
    linear = torch.nn.Linear(3, 2)
    x = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    expected = linear(x)
    with metered([linear]) as (meter,):
        found = linear.forward(x)
    assert relative_error(found, expected) < 1e-6
    assert meter.energy_I.tolist() == pytest.approx([3.0, 3.0, 0.0])
    assert torch.equal(linear(x), expected)
    assert "forward" not in vars(linear)
