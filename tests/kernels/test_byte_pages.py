"""Where int8 keys and values lie; that the C++ path agrees is asked in `test_attention`."""

import pytest
import torch

from dspark.kernels import byte_pages


@pytest.mark.parametrize("head_dim", [8, 20, 64])
@pytest.mark.parametrize("is_key", [True, False])
def test_what_is_written_is_read_rounded_to_int8(head_dim: int, is_key: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    pages = torch.full((5, 3, 2, byte_pages.block_bytes(head_dim)), -1, dtype=torch.int8)
    x_NGE = torch.randn(37, 3, head_dim, generator=generator).bfloat16()
    slots_N = torch.randperm(5 * 32, generator=generator)[:37]
    byte_pages.write(pages, x_NGE, slots_N, is_key=is_key)
    found = byte_pages.read(pages, head_dim=head_dim, is_key=is_key)
    rows_NGE = found[slots_N // 32, :, slots_N % 32]
    assert torch.equal(rows_NGE, byte_pages.rounded(x_NGE))
    scales_NG1 = x_NGE.float().abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((rows_NGE - x_NGE.float()).abs() <= 0.501 * scales_NG1).all())
    is_free = torch.ones(5 * 32, dtype=torch.bool)
    is_free[slots_N] = False
    others = found.transpose(1, 2).flatten(0, 1)[is_free]
    assert bool(others.isnan().all())  # nothing else was touched


def test_noise_is_finite_everywhere() -> None:
    pages = torch.zeros(2, 3, 2, byte_pages.block_bytes(20), dtype=torch.int8)
    byte_pages.fill_with_noise(pages, torch.Generator().manual_seed(0))
    found = byte_pages.read(pages, head_dim=20, is_key=False)
    assert found.shape == (2, 3, 32, 20)
    assert 1.5 < float(found.abs().max()) <= 2.02
