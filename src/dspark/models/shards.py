"""A drafter's weights in several files of limited size, as Hugging Face lays them out.

It knows files and tensors, not what they are. `checkpoint` reads one file and several alike.
"""

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from dspark.errors import InputError, ModelError
from dspark.models.directory import replaced_directory

_WEIGHTS = re.compile(r"model(-.*)?\.safetensors(\.index\.json)?")


def split_weights(folder: Path, *, max_bytes: int) -> list[int]:
    """Rewrite the weights of a directory into files of at most `max_bytes`; their sizes.

    Whole or not at all; everything else in the directory stays. Raises `ModelError` for a
    directory without weights, `InputError` if one tensor alone is larger than a file may be.
    """
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(file))
    if not tensors:
        raise ModelError(f"{folder} holds no weights; give the directory of a drafter.")
    limit = max_bytes - 1024 - 256 * len(tensors)  # names and shapes stand in each file too
    groups: list[list[str]] = [[]]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            raise InputError(
                f"Tensor {name} of {folder} takes {tensor.nbytes / 1e6:.1f} MB, more than a file "
                f"of {max_bytes / 1e6:g} MB holds; allow larger files."
            )
        if tensor.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= tensor.nbytes
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = ["model.safetensors"]
    with replaced_directory(folder, replaces=_WEIGHTS) as new:
        for name, group in zip(names, groups, strict=True):
            save_file({key: tensors[key] for key in group}, new / name, metadata={"format": "pt"})
        if len(groups) > 1:
            placed = {key: name for name, group in zip(names, groups, strict=True) for key in group}
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            (new / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return [(folder / name).stat().st_size for name in names]
