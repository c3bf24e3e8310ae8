import pytest
import torch
from torch import Tensor

from dspark.models.packed_attention import PackedBlocks, packed_attention
from dspark.training.block_attention import block_attention


def inputs(heads: int, groups: int) -> tuple[PackedBlocks, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    anchors = [[0, 3, 7], [9], [2, 5]]
    blocks = PackedBlocks(
        context_lengths=[7, 9, 5],
        num_blocks=[3, 1, 2],
        anchors_A=torch.tensor([a for part in anchors for a in part]),
        block_size=3,
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    slots = [(18, heads, 8), (18, groups, 8), (18, groups, 8)]
    return blocks, [normal(21, groups, 8), normal(21, groups, 8), *(normal(*s) for s in slots)]


@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (6, 1)])
def test_outputs_and_gradients_equal_the_masked_reference(
    window: int | None, heads: int, groups: int
):
    """UC-114, UC-117: also for a block at position 0, which sees no context at all."""
    blocks, tensors = inputs(heads, groups)
    weight_NHE = torch.arange(18 * heads * 8, dtype=torch.float64).view(18, heads, 8).cos()
    results = []
    for attention in (packed_attention, block_attention):
        attend = attention([(tensors[0], tensors[1])], blocks, windows=[window])
        out_NHE = attend(0, *tensors[2:])
        gradients = torch.autograd.grad((out_NHE * weight_NHE).sum(), tensors)
        results.append([out_NHE.detach(), *gradients])
    for one, other in zip(*results, strict=True):
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
