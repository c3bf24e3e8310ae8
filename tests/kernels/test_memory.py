import pytest
import torch

from dspark.kernels import extension
from dspark.kernels.memory import Stream, zeros_in_huge_pages

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [[3, 5], [0, 4], [1 << 20, 3]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_memory_is_zero_and_can_be_written_to_its_ends(
    sizes: list[int], dtype: torch.dtype
) -> None:
    x = zeros_in_huge_pages(sizes, dtype=dtype, device=CPU)
    assert (list(x.shape), x.dtype, x.is_contiguous()) == (sizes, dtype, True)
    assert not bool(x.any())
    x.fill_(1)
    other = zeros_in_huge_pages(sizes, dtype=dtype, device=CPU)
    assert not bool(other.any())
    assert bool((x == 1).all())


def test_large_memory_starts_on_a_huge_page(instructions: str) -> None:
    x = zeros_in_huge_pages([5 << 20], dtype=torch.uint8, device=CPU)
    assert x.data_ptr() % (2 << 20) == 0


def test_a_view_keeps_the_memory_alive(instructions: str) -> None:
    view = zeros_in_huge_pages([4 << 20], dtype=torch.uint8, device=CPU)[-9:]
    assert view.fill_(3).tolist() == [3] * 9


@pytest.mark.parametrize("num_words", [0, 16, 1 << 10, 3 * (1 << 16) + 16])
def test_reading_reaches_every_word(instructions: str, num_words: int) -> None:
    x = torch.randint(0, 1 << 20, (num_words,), dtype=torch.int32)
    assert torch.ops.dspark.read_all(x) == int(x.sum()) % (1 << 32)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_stream_reads_all_of_its_ones(is_loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "IS_LOADED", is_loaded and extension.IS_LOADED)
    stream = Stream(1 << 16)
    assert stream.num_bytes == 1 << 16
    word = 4 if extension.IS_LOADED else 8
    ones = int.from_bytes(b"\x01" * word, "little")
    read = stream.read() - ones * ((1 << 16) // word)
    assert read % (1 << 8 * word) == 0
    assert Stream(0).num_bytes == 64
