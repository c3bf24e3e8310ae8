import math

import pytest
import torch
from torch import nn

from dspark.errors import InputError, NumericsError
from dspark.training.optimizer import (
    Optimizer,
    OptimizerConfig,
    is_matrix_of_backbone,
    orthogonalise,
    schedule,
)


class Module(nn.Module):
    """The names that decide which rule updates a parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(12, 6, bias=False, dtype=dtype)
        self.layers = nn.ModuleList([nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 6, dtype=dtype)])
        self.markov_head = nn.Embedding(10, 4, dtype=dtype)
        self.norm = nn.LayerNorm(6, bias=False, dtype=dtype)

    def give_gradients(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.grad = noise.to(parameter.dtype)


def test_muon_takes_the_matrices_of_layers_and_fc_and_nothing_else():
    chosen = {n for n, p in Module().named_parameters() if is_matrix_of_backbone(n, p)}
    assert chosen == {"fc.weight", "layers.0.weight", "layers.1.weight"}


def test_newton_schulz_brings_all_singular_values_near_one():
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices, steps=5))
    assert values.min().item() > 0.6
    assert values.max().item() < 1.3


def test_a_muon_update_has_the_wanted_size_whatever_the_gradients_size():
    for scale in (1e-6, 1.0, 1e4):
        module = Module()
        optimizer = Optimizer(module, config=OptimizerConfig(muon_lr=0.01, update_rms=0.2))
        before = module.layers[0].weight.detach().clone()
        module.give_gradients(1, scale)
        optimizer.step(factor=1.0)
        change = module.layers[0].weight.detach() - before
        assert change.square().mean().sqrt().item() == pytest.approx(0.01 * 0.2, rel=0.2)


def test_adam_equals_torchs():
    module = Module()
    weight = nn.Parameter(module.markov_head.weight.detach().clone())
    reference = torch.optim.AdamW([weight], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer = Optimizer(module, config=OptimizerConfig(adam_lr=0.01, clip_norm=1e9))
    for seed in range(4):
        module.give_gradients(seed)
        weight.grad = module.markov_head.weight.grad
        optimizer.step(factor=1.0)
        reference.step()
    torch.testing.assert_close(module.markov_head.weight, weight, atol=1e-6, rtol=1e-5)


def test_gradients_beyond_the_clip_norm_are_scaled_together():
    one, other = Module(), Module()
    config = OptimizerConfig(clip_norm=1.0)
    first, second = Optimizer(one, config=config), Optimizer(other, config=config)
    one.give_gradients(0, 1e3)
    other.give_gradients(0)
    norm = first.step(factor=1.0)
    second.step(factor=1.0)
    assert norm == pytest.approx(1e3 * math.sqrt(12 * 6 + 2 * 6 * 8 + 14 + 40 + 6), rel=0.1)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_masters_gather_updates_too_small_for_bf16():
    module = Module(torch.bfloat16)
    optimizer = Optimizer(module, config=OptimizerConfig(adam_lr=1e-4))
    start = module.markov_head.weight.detach().float().clone()
    for _ in range(100):
        module.markov_head.weight.grad = torch.ones(10, 4, dtype=torch.bfloat16)
        optimizer.step(factor=1.0)
    moved = start - module.markov_head.weight.detach().float()
    assert moved.mean().item() == pytest.approx(100 * 1e-4, rel=0.1)


def test_a_gradient_that_is_not_finite_is_named_and_changes_no_weight():
    """UC-115."""
    module = Module()
    optimizer = Optimizer(module, config=OptimizerConfig())
    before = [p.detach().clone() for p in module.parameters()]
    module.give_gradients(0)
    assert module.layers[1].weight.grad is not None
    module.layers[1].weight.grad[2, 3] = float("inf")
    with pytest.raises(NumericsError, match=r"gradient of layers\.1\.weight is not finite"):
        optimizer.step(factor=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_a_restored_state_continues_bit_for_bit():
    """UC-118."""
    one = Module(torch.bfloat16)
    optimizer = Optimizer(one, config=OptimizerConfig())
    for seed in range(3):
        one.give_gradients(seed)
        optimizer.step(factor=0.5)
    other = Module(torch.bfloat16)
    restored = Optimizer(other, config=OptimizerConfig())
    state = {k: dict(v) if isinstance(v, dict) else v for k, v in optimizer.state_dict().items()}
    restored.load_state_dict(state)
    for seed in range(3, 6):
        for module, rule in ((one, optimizer), (other, restored)):
            module.give_gradients(seed)
            rule.step(factor=0.5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_state_of_another_module_is_refused():
    optimizer = Optimizer(Module(), config=OptimizerConfig())
    with pytest.raises(InputError, match="is of another drafter"):
        Optimizer(nn.Linear(2, 2), config=OptimizerConfig()).load_state_dict(optimizer.state_dict())


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    factors = [schedule(step, num_steps=100, warmup=0.04) for step in range(100)]
    assert factors[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert factors[51] == pytest.approx(0.5)
    assert factors[99] == 0.0
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert schedule(0, num_steps=10, warmup=0.0) > 0.9


@pytest.mark.parametrize("name", ["muon_lr", "adam_lr", "clip_norm", "update_rms"])
def test_rates_must_be_positive(name: str):
    with pytest.raises(InputError, match=f"{name} is 0.0"):
        OptimizerConfig(**{name: 0.0})


def test_warmup_must_leave_steps():
    with pytest.raises(InputError, match=r"warmup is 1\.0"):
        OptimizerConfig(warmup=1.0)
