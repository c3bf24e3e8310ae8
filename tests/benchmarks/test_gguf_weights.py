from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

from dspark.benchmarks.gguf_weights import weights_as
from dspark.errors import InputError


@pytest.fixture
def q4_1_file(tmp_path: Path) -> Path:
    """A file with one 4-bit matrix, one vector, and metadata of several types."""
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e5)
    writer.add_token_list(["a", "b"])
    writer.add_file_type(3)
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.attn_q.weight", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "error"), [("bf16", 0.01), ("q8_0", 0.02), ("q4_0", 0.3)])
def test_a_copy_holds_the_dequantised_weights(
    q4_1_file: Path, tmp_path: Path, kind: str, error: float
) -> None:
    copy = GGUFReader(weights_as(q4_1_file, kind, cache=tmp_path / "cache"))
    for before, after in zip(GGUFReader(q4_1_file).tensors, copy.tensors, strict=True):
        assert before.name == after.name
        old = dequantize(before.data, before.tensor_type)
        new = dequantize(after.data, after.tensor_type)
        assert np.abs(old - new).max() <= error * np.abs(old).max()
    assert copy.tensors[0].tensor_type.name.lower() == kind
    assert copy.tensors[1].tensor_type is GGMLQuantizationType.F32


def test_metadata_is_copied_and_the_file_type_told_anew(q4_1_file: Path, tmp_path: Path) -> None:
    copy = GGUFReader(weights_as(q4_1_file, "bf16", cache=tmp_path / "cache"))
    for name, field in GGUFReader(q4_1_file).fields.items():
        if name != "general.file_type" and not name.startswith("GGUF."):
            assert copy.fields[name].contents() == field.contents()
    assert copy.fields["general.file_type"].contents() == 32


def test_a_second_call_finds_the_first_copy(q4_1_file: Path, tmp_path: Path) -> None:
    first = weights_as(q4_1_file, "q8_0", cache=tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert weights_as(q4_1_file, "q8_0", cache=tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_an_unknown_type_is_refused(q4_1_file: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="q3_k"):
        weights_as(q4_1_file, "q3_k", cache=tmp_path)
