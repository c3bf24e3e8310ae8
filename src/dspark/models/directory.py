"""A directory that appears whole or not at all. It does not know what is in it."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dspark.errors import CapacityError, ModelError

_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


@contextmanager
def replaced_directory(path: Path, *, replaces: re.Pattern[str]) -> Iterator[Path]:
    """A new directory to fill, which takes the place of `path` when the block ends well.

    Files of the old one stay unless their names match `replaces`. If anything fails, `path` is as
    it was. Raises `CapacityError` for a full disk, `ModelError` where nothing can be written.
    """
    if path.exists() and not path.is_dir():
        raise ModelError(f"{path} is a file, but a directory is to be written; rename one of them.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same parent, so that the renames cannot cross file systems.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as room:
            new, old = Path(room, "new"), Path(room, "old")
            new.mkdir()
            yield new
            _let_others_read(new)
            _keep_others(path, new, replaces)
            for file in (*new.iterdir(), new):
                _sync(file)
            if path.exists():
                path.rename(old)
            try:
                new.rename(path)
            except BaseException:  # not even an interrupt may lose the old one
                if old.exists():
                    old.rename(path)
                raise
            _sync(path.parent)
    except (OSError, SafetensorError) as error:
        if _errno(error) in _NO_ROOM:
            raise CapacityError(
                f"The disk has no room for {path}; what was there is unchanged, free some "
                "space and save again."
            ) from error
        raise ModelError(f"{path} cannot be written ({error}); choose another place.") from error


def _let_others_read(folder: Path) -> None:
    """safetensors writes files for their owner alone; a drafter is as readable as its directory."""
    for file in folder.iterdir():
        file.chmod(folder.stat().st_mode & 0o666)


def _keep_others(old: Path, new: Path, replaces: re.Pattern[str]) -> None:
    """Carry over what this save does not make: a model card, calibration, a trainer's state."""
    if not old.is_dir():
        return
    for entry in old.iterdir():
        if replaces.fullmatch(entry.name):
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, copy_function=_link, symlinks=True)
        elif not (new / entry.name).exists():
            _link(str(entry), str(new / entry.name))


def _link(source: str, destination: str) -> None:
    try:
        os.link(source, destination)
    except OSError:  # a file system without hard links
        shutil.copy2(source, destination)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _errno(error: OSError | SafetensorError) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    code = re.search(r"os error (\d+)", str(error))  # safetensors keeps it in the text only
    return None if code is None else int(code[1])
