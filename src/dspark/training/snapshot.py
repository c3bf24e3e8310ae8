"""Files of a running training, whole or not there. It knows no optimiser and no step."""

import os
from pathlib import Path
from typing import Any

import torch

from dspark.errors import CapacityError, ModelError


def write_snapshot(file: Path, content: dict[str, Any]) -> None:
    """Replace `file` by the new content in one step, so that a kill leaves the old one.

    Raises `CapacityError` where the disk is full; the old file then is as it was.
    """
    temporary = file.with_suffix(file.suffix + ".tmp")
    try:
        with temporary.open("wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CapacityError(
            f"{file} could not be written ({error}); free some disk space and run again, it goes "
            "on from the checkpoint before."
        ) from error


def read_snapshot(file: Path) -> dict[str, Any]:
    """What `write_snapshot` wrote; tensors and plain values only, no code.

    Raises `ModelError` for a damaged file.
    """
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(
            f"{file} cannot be read ({error}); delete it to start the training again."
        ) from error
    return content
