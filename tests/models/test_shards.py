"""Weights in several files: the same drafter, no file too large, nothing half done."""

import shutil
from pathlib import Path

import pytest
import torch

from dspark.errors import InputError, ModelError
from dspark.models.checkpoint import load_drafter
from dspark.models.shards import split_weights
from dspark.models.target import Target


@pytest.fixture
def folder(drafter_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    shutil.copytree(drafter_dir, path)
    (path / "README.md").write_text("card")
    return path


def test_split_weights_load_as_the_same_drafter(
    model_dir: Path, drafter_dir: Path, folder: Path
) -> None:
    sizes = split_weights(folder, max_bytes=40_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(sizes) == len(files) > 1
    assert max(file.stat().st_size for file in files) == max(sizes) <= 40_000
    assert (folder / "README.md").read_text() == "card"
    target = Target.load(model_dir, dtype=torch.float32, packed=False)
    whole = load_drafter(drafter_dir, target, num_tokens=301).state_dict()
    parts = load_drafter(folder, target, num_tokens=301).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_are_as_readable_as_their_directory(folder: Path) -> None:
    split_weights(folder, max_bytes=100_000)
    folder.chmod(0o755)
    split_weights(folder, max_bytes=100_000)
    modes = {file.stat().st_mode & 0o777 for file in folder.glob("model*")}
    assert modes == {folder.stat().st_mode & 0o666}


def test_split_again_with_more_room_is_one_file(folder: Path) -> None:
    split_weights(folder, max_bytes=40_000)
    assert len(split_weights(folder, max_bytes=10_000_000)) == 1
    assert sorted(file.name for file in folder.iterdir()) == [
        *("README.md", "config.json", "model.safetensors")
    ]


def test_a_tensor_that_fits_nowhere_leaves_everything_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"Tensor .* allow larger files"):
        split_weights(folder, max_bytes=8_000)
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(ModelError, match="holds no weights"):
        split_weights(tmp_path, max_bytes=8_000)
