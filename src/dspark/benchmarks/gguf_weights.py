"""A GGUF file with the same weights in another type, for peers that read GGUF.

It knows files and number formats, no engine. Copies are made once and kept.
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    Keys,
    LlamaFileType,
    dequantize,
    quantize,
)

from dspark.errors import CapacityError, InputError

_TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}


def weights_as(source: Path, kind: str, *, cache: Path) -> Path:
    """`source` with each matrix dequantised and stored as `kind` (bf16, q8_0, q4_0).

    Vectors stay float32. The copy lies in `cache`; it appears there whole or not at all.
    """
    if kind not in _TYPES:
        raise InputError(f"weights are {kind!r}, but they must be one of {', '.join(_TYPES)}.")
    copy = cache / f"{source.stem}-{source.stat().st_size}.{kind}.gguf"
    if copy.is_file():
        return copy
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".gguf-", dir=cache))
    try:
        _write(source, scratch / copy.name, kind)
        os.replace(scratch / copy.name, copy)  # noqa: PTH105 (atomic on one file system)
    except OSError as error:
        raise CapacityError(
            f"{copy} could not be written ({error.strerror or error}); free some disk space."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return copy


def _write(source: Path, destination: Path, kind: str) -> None:
    matrix_type, file_type = _TYPES[kind]
    reader = GGUFReader(source)
    architecture = reader.get_field(Keys.General.ARCHITECTURE)
    assert architecture is not None
    writer = GGUFWriter(destination, architecture.contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == Keys.General.ARCHITECTURE:
            continue
        if name == Keys.General.FILE_TYPE:
            writer.add_file_type(file_type)
            continue
        item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        is_matrix = len(tensor.shape) > 1
        stored = matrix_type if is_matrix else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
