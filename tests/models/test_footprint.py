"""Memory of a model before it is loaded, against what loading it takes."""

from pathlib import Path

import pytest
import torch

from dspark.errors import CapacityError
from dspark.llm import LLM
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DrafterConfig
from dspark.models.footprint import Footprint, check_memory
from dspark.models.target import Target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_tell_the_bytes_of_weights_and_of_a_position(
    model_dir: Path, dtype: torch.dtype
) -> None:
    found = Footprint.of(model_dir, name="toy", dtype=dtype)
    target = Target.load(model_dir, dtype=dtype, packed=False)
    tensors = {p.data_ptr(): p for p in target.model.parameters()}
    assert found is not None
    assert found.weights == sum(p.numel() * p.element_size() for p in tensors.values())
    pages = target.allocate_pages(num_pages=3, page_size=4)
    taken = sum(t.numel() * t.element_size() for t in (*pages.keys, *pages.values))
    assert found.per_position * 12 == taken


def test_int8_keys_and_values_count_with_their_scales(model_dir: Path) -> None:
    found = Footprint.of(model_dir, name="toy", dtype=torch.float32, kv_dtype=torch.int8)
    target = Target.load(model_dir, dtype=torch.float32, kv_dtype=torch.int8, packed=False)
    pages = target.allocate_pages(num_pages=3, page_size=32)
    assert found is not None
    assert found.per_position * 96 == sum(t.nbytes for t in (*pages.keys, *pages.values))


def test_a_drafter_counts_the_taps_that_it_has_not_taken_in(
    model_dir: Path, drafter_dir: Path
) -> None:
    found = Footprint.of(drafter_dir, name="toy", dtype=torch.float32)
    target = Target.load(model_dir, dtype=torch.float32, packed=False)
    config = load_drafter(drafter_dir, target).config
    assert isinstance(config, DrafterConfig)
    keys_and_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert found is not None
    assert found.per_position == 4 * (keys_and_values + config.taps_size)


def test_what_cannot_be_read_is_left_to_the_loader(tmp_path: Path) -> None:
    assert Footprint.of("some/hub-name", name="x", dtype=torch.float32) is None
    (tmp_path / "config.json").write_text("{}")
    assert Footprint.of(tmp_path, name="x", dtype=torch.float32) is None
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert Footprint.of(tmp_path, name="x", dtype=torch.float32) is None


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """UC-166."""
    target = Footprint(name="big", weights=8_000_000_000, per_position=100_000)
    drafter = Footprint(name="small", weights=500_000_000, per_position=10_000)
    check_memory([target, drafter], num_positions=1000, free_bytes=8_610_000_000, device="cpu")
    with pytest.raises(CapacityError) as refused:
        check_memory([target, drafter], num_positions=1000, free_bytes=8_609_999_999, device="cpu")
    for part in ("8.61 GB", "1,000 positions", "big 8.00 GB and 0.10 GB", "small 0.50 GB", "free"):
        assert part in str(refused.value)


def test_loading_asks_before_it_reads(
    model_dir: Path, drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-166."""
    monkeypatch.setattr("dspark.llm.free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match="are free; choose a smaller"):
        LLM.load(model_dir, drafter=drafter_dir, dtype="fp32", device="cpu", compile=False)
    monkeypatch.setattr("dspark.llm.free_memory", lambda device: None)
    LLM.load(model_dir, drafter=None, dtype="fp32", device="cpu", compile=False)
