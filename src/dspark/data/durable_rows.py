"""Files of JSON lines that lose nothing: a row is on the disk before its writer goes on."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.errors import CapacityError


def is_unfinished_header(raw: bytes, key: str) -> bool:
    """Whether a file without a whole line is one of ours whose first row, `{key: {..}}`, was cut.

    Nothing may be taken away from any other file.
    """
    begin = json.dumps({key: {}}).encode().removesuffix(b"}}")
    return begin.startswith(raw[: len(begin)])


def append_row(path: Path, row: Mapping[str, Any], *, rows: str, kept: str) -> None:
    """Add a line and wait until it is on the disk.

    `rows` and `kept` name, for the message, what the file takes and what is safe already. Raises
    `CapacityError` where the disk takes no more.
    """
    try:
        with path.open("ab") as stream:
            stream.write(json.dumps(row).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CapacityError(
            f"{path} took no more {rows} ({error}); free some disk space and run the same command "
            f"again, finished {kept} are kept."
        ) from error
