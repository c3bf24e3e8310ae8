"""Hidden states of answers on disk: written once, resumable at any kill, checked when read.

    manifest.json   what the cache holds and of which target; another target is refused
    channels.npy    int8 only: the size of each channel
    rows.bin        one row of `state_rows.RowCodec` a token
    lse.bin         float32 log-sum-exp a token
    index.jsonl     one line an answer, written last: where its rows are and their checksum
    mass-<n>.npy    the token mass after n answers

An answer counts once its line is in the index; whatever lies behind the last indexed row is cut
off on opening. An answer whose rows turn out to be damaged gets a line that drops it and is
computed again. It does not know what a drafter learns from states.

Letters: legend in core.py; T tokens of one sequence, X = M + D numbers of a row, B its bytes.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dspark.data.answers import Answer
from dspark.data.hidden_states import States
from dspark.data.state_rows import RowCodec, channel_scales
from dspark.errors import CapacityError, ModelError

_VERSION = 2
_INDEX_BYTES = 120
"""About the length of an index line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """What a cache holds and of which target; a cache is used only where all of it is equal."""

    target: str
    """Fingerprint of the target whose states these are."""
    target_dtype: str
    """The arithmetic they were computed in."""
    template: str
    """Hash of the chat template that made the prompts; empty without one."""
    tokenizer: str
    """Hash of the tokenizer."""
    tap_layers: tuple[int, ...]
    tap_size: int
    """Numbers of one row of taps: layers times hidden size."""
    hidden_size: int
    vocab_size: int
    dtype: str = "bf16"
    """Of the rows: bf16 or int8."""

    @property
    def width(self) -> int:
        """X: numbers of a row."""
        return self.tap_size + self.hidden_size

    @property
    def codec(self) -> RowCodec:
        """How a row lies in the file; without the channels' scales."""
        return RowCodec(dtype=self.dtype, width=self.width, hidden_size=self.hidden_size)

    @property
    def bytes_per_token(self) -> int:
        """Disk space of one token: its row and a float32 log-sum-exp."""
        return self.codec.row_bytes + 4

    def predicted_bytes(self, *, num_tokens: int, num_answers: int) -> int:
        """Size of a whole cache, known before the first byte is written."""
        fixed = 8 * self.vocab_size + (4 * self.width if self.dtype == "int8" else 0)
        return num_tokens * self.bytes_per_token + num_answers * _INDEX_BYTES + fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Where an answer's rows are, and how they and its tokens are recognised."""

    start: int
    num_tokens: int
    checksum: int
    ids_checksum: int


class _Index:
    """The index file: the last line about an answer counts; a line without `start` drops it."""

    def __init__(self, path: Path, *, repair: bool) -> None:
        self.file = path / "index.jsonl"
        self.entries: dict[str, _Entry] = {}
        self.num_rows = 0
        self.num_appended = 0
        if not self.file.exists():
            return
        raw = self.file.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if repair and len(whole) < len(raw):
            os.truncate(self.file, len(whole))
        for line in whole.splitlines():
            values = json.loads(line)
            answer_id = values.pop("id")
            if values:
                self.add(answer_id, _Entry(**values))
            else:
                self.entries.pop(answer_id, None)

    def add(self, answer_id: str, entry: _Entry) -> None:
        """An appended answer."""
        self.entries[answer_id] = entry
        self.num_rows = entry.start + entry.num_tokens
        self.num_appended += 1

    def find(self, answer: Answer) -> _Entry | None:
        """The entry of this answer; `None` as well for another answer of the same id."""
        entry = self.entries.get(answer.id)
        if entry is None or entry.ids_checksum != _ids_checksum(answer):
            return None
        return entry

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines and wait for the disk."""
        with self.file.open("a") as stream:
            stream.write("".join(json.dumps(line) + "\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())


class StatesWriter:
    """Appends answers' states to a cache; after a kill at any moment the next writer goes on.

    The token mass (sum over supervised positions of the target's distribution, float64 [V])
    belongs to the answers appended so far; one that was computed again counts twice.
    """

    def __init__(self, path: str | Path, *, format: CacheFormat) -> None:
        self.path = Path(path)
        self.format = format
        self.path.mkdir(parents=True, exist_ok=True)
        manifest = self.path / "manifest.json"
        if manifest.exists():
            _check_same(format, _read_manifest(self.path), self.path)
        else:
            content = {"version": _VERSION, **asdict(format)}
            _write_atomically(manifest, json.dumps(content, indent=1).encode())
        self._codec = _codec(self.path, format)
        self._index = _Index(self.path, repair=True)
        self.mass_V = _read_mass(self.path, index=self._index, format=format)
        self._pending: list[dict[str, Any]] = []
        self._rows = _open_at(self.path / "rows.bin", self._index.num_rows * self._codec.row_bytes)
        self._lse = _open_at(self.path / "lse.bin", self._index.num_rows * 4)

    def __len__(self) -> int:
        return len(self._index.entries)

    def holds(self, answer: Answer) -> bool:
        """Whether the states of this very answer are there."""
        return self._index.find(answer) is not None

    def drop(self, answer_ids: Sequence[str]) -> None:
        """Forget answers whose rows are damaged."""
        self._index.write([{"id": answer_id} for answer_id in answer_ids])
        for answer_id in answer_ids:
            self._index.entries.pop(answer_id, None)

    def append(self, answer: Answer, states: States) -> None:
        """Add one answer; it survives a kill only after the next `flush`.

        Raises `ModelError` for states that are not as long as the answer (UC-123).
        """
        num_tokens = len(answer.prompt_token_ids) + len(answer.token_ids)
        lse_T = states.lse_N
        if lse_T is None:
            lse_T = torch.full((len(states.last_ND),), float("nan"))
        for name, tensor in (("taps", states.taps_NM), ("states", states.last_ND), ("lse", lse_T)):
            if len(tensor) != num_tokens:
                raise ModelError(
                    f"Answer {answer.id!r} has {num_tokens} tokens, but {len(tensor)} rows of "
                    f"{name} came back; a cached prefix must not be left out of the target's pass."
                )
        row_TX = torch.cat([states.taps_NM, states.last_ND], dim=1)
        self.fit_channels(row_TX)
        rows, lse = _bytes(self._codec.encode(row_TX)), _bytes(lse_T.float().cpu())
        self._write(rows, lse)
        entry = _Entry(
            start=self._index.num_rows,
            num_tokens=num_tokens,
            checksum=zlib.crc32(lse, zlib.crc32(rows)),
            ids_checksum=_ids_checksum(answer),
        )
        self._pending.append({"id": answer.id, **asdict(entry)})
        self._index.add(answer.id, entry)

    def fit_channels(self, row_TX: Tensor) -> None:
        """Take the channels' scales of int8 rows from these, unless the cache has them."""
        if self.format.dtype != "int8" or self._codec.channel_scale_X is not None:
            return
        scale_X = channel_scales(row_TX)
        with (self.path / "channels.npy.tmp").open("wb") as stream:
            np.save(stream, scale_X.numpy())
            stream.flush()
            os.fsync(stream.fileno())
        (self.path / "channels.npy.tmp").replace(self.path / "channels.npy")
        self._codec = replace(self._codec, channel_scale_X=scale_X)

    def flush(self) -> None:
        """Make everything appended so far durable: rows, then mass, then index."""
        if not self._pending:
            return
        for stream in (self._rows, self._lse):
            stream.flush()
            os.fsync(stream.fileno())
        mass_file = self.path / f"mass-{self._index.num_appended}.npy"
        with mass_file.open("wb") as stream:
            np.save(stream, self.mass_V.cpu().numpy())
            stream.flush()
            os.fsync(stream.fileno())
        self._index.write(self._pending)
        self._pending.clear()
        for other in self.path.glob("mass-*.npy"):
            if other != mass_file:
                other.unlink()

    def close(self) -> None:
        """Flush and release the files."""
        self.flush()
        self.release()

    def release(self) -> None:
        """Close the files; what was not flushed is not there for the next writer."""
        self._rows.close()
        self._lse.close()

    def _write(self, rows: bytes, lse: bytes) -> None:
        try:
            self._rows.write(rows)
            self._lse.write(lse)
        except OSError as error:
            raise CapacityError(
                f"{self.path} took {self._index.num_rows} tokens and then refused ({error}); "
                "free some disk space and start again, finished answers are kept."
            ) from error


class StatesCache:
    """Reads what a `StatesWriter` wrote; memory-mapped, so the page cache bounds memory.

    The first read of an answer checks it; damage is a `ModelError` that names file and answer.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.format = _read_manifest(self.path)
        self._codec = _codec(self.path, self.format)
        self._index = _Index(self.path, repair=False)
        self._rows = _mapped(self.path / "rows.bin", np.uint8, self._codec.row_bytes)
        self._lse = _mapped(self.path / "lse.bin", np.float32, 1)
        self._checked: set[str] = set()

    @property
    def num_tokens(self) -> int:
        """Rows of all answers."""
        return sum(entry.num_tokens for entry in self._index.entries.values())

    @property
    def num_bytes(self) -> int:
        """What lies on the disk."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._index.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.entries)

    def expect(self, answers: Sequence[Answer]) -> None:
        """Nothing to prepare: the disk reads ahead by itself."""

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """States in bf16; an answer that is not cached, or not this one, is a `ModelError`."""
        return [self._read_one(answer) for answer in answers]

    def damaged(self) -> list[str]:
        """Answers whose rows are cut or changed; reads everything once (UC-125)."""
        return [
            answer_id
            for answer_id, entry in self._index.entries.items()
            if not self._is_whole(entry)
        ]

    def mass(self) -> Tensor:
        """Summed target probability of each token over the supervised positions, float64 [V]."""
        return _read_mass(self.path, index=self._index, format=self.format)

    def _read_one(self, answer: Answer) -> States:
        entry = self._index.find(answer)
        if entry is None:
            raise ModelError(
                f"{self.path} holds no states of answer {answer.id!r} as it is now; fill the "
                "cache for this answers file first."
            )
        if answer.id not in self._checked and not self._is_whole(entry):
            raise ModelError(
                f"{self.path / 'rows.bin'} is damaged at answer {answer.id!r}; run the same "
                "command again, it computes the damaged answers anew."
            )
        self._checked.add(answer.id)
        rows = slice(entry.start, entry.start + entry.num_tokens)
        row_TX = self._codec.decode(torch.from_numpy(np.array(self._rows[rows])))
        lse_T = torch.from_numpy(np.array(self._lse[rows, 0]))
        return States(
            taps_NM=row_TX[:, : self.format.tap_size],
            last_ND=row_TX[:, self.format.tap_size :],
            lse_N=None if bool(lse_T.isnan().all()) else lse_T,
        )

    def _is_whole(self, entry: _Entry) -> bool:
        rows = slice(entry.start, entry.start + entry.num_tokens)
        if rows.stop > min(len(self._rows), len(self._lse)):
            return False
        checksum = zlib.crc32(self._lse[rows].tobytes(), zlib.crc32(self._rows[rows].tobytes()))
        return checksum == entry.checksum


def require_limit(num_bytes: int, *, limit_gb: float | None) -> None:
    """A cache above the user's limit is a `CapacityError`."""
    if limit_gb is not None and num_bytes > limit_gb * 1e9:
        raise CapacityError(
            f"A cache of these answers takes {num_bytes / 1e9:.2f} GB, above the limit of "
            f"{limit_gb:g} GB; raise --cache-gb, take int8 rows, fewer answers, or states online."
        )


def require_space(path: Path, *, num_bytes: int) -> None:
    """A disk without that much space is a `CapacityError`."""
    free = shutil.disk_usage(path).free
    if num_bytes > free:
        raise CapacityError(
            f"The cache of these answers takes another {num_bytes / 1e9:.2f} GB and {path} has "
            f"{free / 1e9:.2f} GB free; use int8 rows, fewer answers, another disk, or states "
            "online."
        )


def _ids_checksum(answer: Answer) -> int:
    return zlib.crc32(_bytes(answer.ids()))


def _bytes(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().numpy().tobytes()
    return data


def _read_manifest(path: Path) -> CacheFormat:
    manifest = path / "manifest.json"
    if not manifest.exists():
        raise ModelError(f"{path} is no cache of hidden states: manifest.json is missing.")
    data = json.loads(manifest.read_text())
    if data.pop("version", None) != _VERSION:
        raise ModelError(
            f"{path} is of another version of the cache format than {_VERSION}; delete the folder "
            "to compute the states again."
        )
    return CacheFormat(**{**data, "tap_layers": tuple(data["tap_layers"])})


def _check_same(wanted: CacheFormat, found: CacheFormat, path: Path) -> None:
    for name, value in asdict(found).items():
        needed = getattr(wanted, name)
        if needed != value:
            raise ModelError(
                f"{path} holds states with {name.replace('_', ' ')} {value!r}, but this run needs "
                f"{needed!r}; use another folder or delete this one."
            )


def _codec(path: Path, format: CacheFormat) -> RowCodec:
    file = path / "channels.npy"
    if format.dtype != "int8" or not file.exists():
        return format.codec
    return replace(format.codec, channel_scale_X=torch.from_numpy(np.load(file)))


def _read_mass(path: Path, *, index: _Index, format: CacheFormat) -> Tensor:
    file = path / f"mass-{index.num_appended}.npy"
    if index.num_appended == 0 or not file.exists():
        return torch.zeros(format.vocab_size, dtype=torch.float64)
    return torch.from_numpy(np.load(file))


def _mapped(file: Path, dtype: type, width: int) -> Any:
    """The whole rows of a file, read-only; a cut last row is left out."""
    row_bytes = np.dtype(dtype).itemsize * width
    num_rows = file.stat().st_size // row_bytes if file.exists() else 0
    if num_rows == 0:
        return np.zeros((0, width), dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=(num_rows, width))


def _open_at(file: Path, size: int) -> BinaryIO:
    if not file.exists():
        file.touch()
    os.truncate(file, size)
    return file.open("ab")


def _write_atomically(file: Path, data: bytes) -> None:
    temporary = file.with_suffix(file.suffix + ".tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
