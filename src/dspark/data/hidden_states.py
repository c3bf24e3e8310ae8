"""The target's states of whole answers: computed online, or kept in a cache on disk.

It does not know what a drafter learns from them. States, not logits, are kept: D numbers a
layer and token instead of V (method section 7).

Letters: legend in core.py; T tokens of one sequence, X = M + D numbers of a cached row.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.algorithms.row_chunks import row_chunks
from dspark.data.answers import Answer
from dspark.errors import CapacityError, ModelError
from dspark.models.target import Target

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What the target computed for the N tokens of one sequence.

    `taps_NM` outputs of the tapped layers side by side; `last_ND` after the final norm;
    `lse_N` float32 log-sum-exp of the full-vocabulary logits, NaN at positions where it was
    not computed (prompts), `None` when it is not known at all. The last token of a sequence
    need not have run through the target: no block ever reads its row.
    """

    taps_NM: Tensor
    last_ND: Tensor
    lse_N: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """What a cache holds and of which target; two caches mix only when these are equal."""

    target: str
    """Fingerprint or name of the target whose states these are."""
    tap_layers: tuple[int, ...]
    tap_size: int
    """Numbers of one row of taps: layers times hidden size."""
    hidden_size: int
    vocab_size: int

    @property
    def bytes_per_token(self) -> int:
        """Disk space of one token: bf16 taps and last hidden state, fp32 log-sum-exp."""
        return 2 * (self.tap_size + self.hidden_size) + 4


class StatesSource(Protocol):
    """Where a trainer's states come from: `OnlineStates` or `StatesCache`."""

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """States of some answers, in their order."""
        ...


class OnlineStates:
    """The target runs whenever states are wanted: no disk, and one target pass an epoch."""

    def __init__(self, target: Target, *, tap_layers: Sequence[int]) -> None:
        self._target = target
        self._tap_layers = tuple(tap_layers)

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """One flattened pass over all of them; no log-sum-exp."""
        sequences = [answer.ids() for answer in answers]
        output = self._target.states(sequences, tap_layers=self._tap_layers)
        lengths = [len(ids) for ids in sequences]
        pairs = zip(
            torch.split(output.taps_NM, lengths),
            torch.split(output.hidden_ND, lengths),
            strict=True,
        )
        return [States(taps_NM=taps, last_ND=last, lse_N=None) for taps, last in pairs]


class StatesWriter:
    """Appends answers' states to a cache; after a kill at any moment the next writer goes on.

    A sequence counts once its line is in the index, which is written last; whatever lies
    behind the last indexed row is cut off on opening. The token mass (sum over supervised
    positions of the target's distribution, float64 [V]) belongs to exactly the indexed
    sequences.
    """

    def __init__(self, path: str | Path, *, format: CacheFormat) -> None:
        self.path = Path(path)
        self.format = format
        self.path.mkdir(parents=True, exist_ok=True)
        manifest = self.path / "manifest.json"
        if manifest.exists():
            _check_same(format, _read_manifest(self.path), self.path)
        else:
            _write_atomically(manifest, json.dumps(_manifest(format), indent=1).encode())
        self._index = _read_index(self.path, repair=True)
        self._num_rows = sum(count for _, count in self._index.values())
        self.mass_V = _read_mass(self.path, num_sequences=len(self._index), format=format)
        self._rows = _open_at(self.path / "rows.bin", self._num_rows * self._row_bytes)
        self._lse = _open_at(self.path / "lse.bin", self._num_rows * 4)
        self._pending: list[tuple[str, int, int]] = []

    @property
    def _row_bytes(self) -> int:
        return 2 * (self.format.tap_size + self.format.hidden_size)

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._index

    def __len__(self) -> int:
        return len(self._index)

    def append(self, answer_id: str, states: States) -> None:
        """Add one sequence; it survives a kill only after the next `flush`."""
        row_NX = torch.cat([states.taps_NM, states.last_ND], dim=1).to(torch.bfloat16).contiguous()
        num_tokens = row_NX.shape[0]
        lse_N = states.lse_N
        if lse_N is None:
            lse_N = torch.full((num_tokens,), float("nan"))
        try:
            self._rows.write(row_NX.cpu().view(torch.int16).numpy().tobytes())
            self._lse.write(lse_N.float().cpu().numpy().tobytes())
        except OSError as error:
            raise CapacityError(
                f"{self.path} took {self._num_rows} tokens and then refused ({error}); "
                "free some disk space and start again, finished sequences are kept."
            ) from error
        self._pending.append((answer_id, self._num_rows, num_tokens))
        self._index[answer_id] = (self._num_rows, num_tokens)
        self._num_rows += num_tokens

    def flush(self) -> None:
        """Make everything appended so far durable: rows, then mass, then index."""
        for stream in (self._rows, self._lse):
            stream.flush()
            os.fsync(stream.fileno())
        mass_file = self.path / f"mass-{len(self._index)}.npy"
        with mass_file.open("wb") as stream:
            np.save(stream, self.mass_V.cpu().numpy())
            stream.flush()
            os.fsync(stream.fileno())
        lines = "".join(
            json.dumps({"id": i, "start": start, "num_tokens": count}) + "\n"
            for i, start, count in self._pending
        )
        with (self.path / "index.jsonl").open("a") as index:
            index.write(lines)
            index.flush()
            os.fsync(index.fileno())
        self._pending.clear()
        for other in self.path.glob("mass-*.npy"):
            if other != mass_file:
                other.unlink()

    def close(self) -> None:
        """Flush and release the files."""
        self.flush()
        self._rows.close()
        self._lse.close()


class StatesCache:
    """Reads what a `StatesWriter` wrote; memory-mapped, so the page cache bounds memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.format = _read_manifest(self.path)
        self._index = _read_index(self.path, repair=False)
        self.num_tokens = sum(count for _, count in self._index.values())
        width = self.format.tap_size + self.format.hidden_size
        shape = (self.num_tokens, width)
        self._rows = np.memmap(self.path / "rows.bin", dtype=np.int16, mode="r", shape=shape)
        self._lse = np.memmap(
            self.path / "lse.bin", dtype=np.float32, mode="r", shape=(self.num_tokens,)
        )

    def __contains__(self, answer_id: str) -> bool:
        return answer_id in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def read(self, answers: Sequence[Answer]) -> list[States]:
        """States in bf16; an answer that is not cached is a `ModelError`."""
        return [self.read_one(answer.id) for answer in answers]

    def read_one(self, answer_id: str) -> States:
        """States of one answer by its id."""
        if answer_id not in self._index:
            raise ModelError(
                f"{self.path} holds no states of answer {answer_id!r}; "
                "fill the cache for this answers file first."
            )
        start, count = self._index[answer_id]
        row_TX = torch.from_numpy(np.array(self._rows[start : start + count])).view(torch.bfloat16)
        lse_T = torch.from_numpy(np.array(self._lse[start : start + count]))
        return States(
            taps_NM=row_TX[:, : self.format.tap_size],
            last_ND=row_TX[:, self.format.tap_size :],
            lse_N=None if bool(lse_T.isnan().all()) else lse_T,
        )

    def mass(self) -> Tensor:
        """Summed target probability of each token over the supervised positions, float64 [V]."""
        return _read_mass(self.path, num_sequences=len(self._index), format=self.format)


def require_space(path: str | Path, *, num_tokens: int, format: CacheFormat) -> int:
    """Bytes that a cache of `num_tokens` takes; a disk without that much is a `CapacityError`."""
    needed = num_tokens * format.bytes_per_token
    parent = Path(path)
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CapacityError(
            f"A cache of {num_tokens} tokens takes {needed / 1e9:.1f} GB and {parent} has "
            f"{free / 1e9:.1f} GB free; use fewer answers, another disk, or states online."
        )
    return needed


def _manifest(format: CacheFormat) -> dict[str, object]:
    return {
        "version": _VERSION,
        "target": format.target,
        "tap_layers": list(format.tap_layers),
        "tap_size": format.tap_size,
        "hidden_size": format.hidden_size,
        "vocab_size": format.vocab_size,
    }


def _read_manifest(path: Path) -> CacheFormat:
    manifest = path / "manifest.json"
    if not manifest.exists():
        raise ModelError(f"{path} is no cache of hidden states: manifest.json is missing.")
    data = json.loads(manifest.read_text())
    if data.get("version") != _VERSION:
        raise ModelError(
            f"{path} has version {data.get('version')!r} of the cache format, this program reads "
            f"{_VERSION}; delete the folder to compute the states again."
        )
    return CacheFormat(
        target=data["target"],
        tap_layers=tuple(data["tap_layers"]),
        tap_size=data["tap_size"],
        hidden_size=data["hidden_size"],
        vocab_size=data["vocab_size"],
    )


def _check_same(wanted: CacheFormat, found: CacheFormat, path: Path) -> None:
    for name in ("target", "tap_layers", "tap_size", "hidden_size", "vocab_size"):
        a, b = getattr(wanted, name), getattr(found, name)
        if a != b:
            raise ModelError(
                f"{path} holds states with {name} {b!r}, but this run needs {a!r}; "
                "use another folder or delete this one."
            )


def _read_index(path: Path, *, repair: bool) -> dict[str, tuple[int, int]]:
    """Sequence id to (first row, number of rows); a cut last line is dropped."""
    file = path / "index.jsonl"
    if not file.exists():
        return {}
    raw = file.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if repair and len(whole) < len(raw):
        os.truncate(file, len(whole))
    entries = (json.loads(line) for line in whole.splitlines())
    return {entry["id"]: (entry["start"], entry["num_tokens"]) for entry in entries}


def _read_mass(path: Path, *, num_sequences: int, format: CacheFormat) -> Tensor:
    file = path / f"mass-{num_sequences}.npy"
    if num_sequences == 0 or not file.exists():
        return torch.zeros(format.vocab_size, dtype=torch.float64)
    return torch.from_numpy(np.load(file))


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


def fill_cache(
    target: Target,
    answers: Sequence[Answer],
    path: str | Path,
    *,
    tap_layers: Sequence[int],
    fingerprint: str,
    tokens_per_pass: int = 2560,
    passes_per_flush: int = 8,
    on_answer: Callable[[int, int], None] | None = None,
) -> StatesCache:
    """Run the target once over all answers and keep what training needs; resumable at any kill.

    Raises `CapacityError` before the first pass if the disk cannot hold the cache.
    `on_answer(done, total)` reports progress.
    """
    format = CacheFormat(
        target=fingerprint,
        tap_layers=tuple(tap_layers),
        tap_size=len(tap_layers) * target.spec.hidden_size,
        hidden_size=target.spec.hidden_size,
        vocab_size=target.spec.vocab_size,
    )
    writer = StatesWriter(path, format=format)
    todo = [answer for answer in answers if answer.id not in writer]
    num_tokens = sum(len(a.prompt_token_ids) + len(a.token_ids) for a in todo)
    require_space(path, num_tokens=num_tokens, format=format)
    online = OnlineStates(target, tap_layers=tap_layers)
    num_left = len(todo)
    for number, part in enumerate(_passes(todo, tokens_per_pass), start=1):
        for answer, states in zip(part, online.read(part), strict=True):
            first = len(answer.prompt_token_ids)
            lse_N = torch.full((len(states.last_ND),), float("nan"))
            lse_N[first:] = sum_mass(target, states.last_ND[first:], mass_V=writer.mass_V).cpu()
            writer.append(
                answer.id, States(taps_NM=states.taps_NM, last_ND=states.last_ND, lse_N=lse_N)
            )
        if number % passes_per_flush == 0:
            writer.flush()
        num_left -= len(part)
        if on_answer is not None:
            on_answer(len(answers) - num_left, len(answers))
    writer.close()
    return StatesCache(path)


def sum_mass(
    target: Target, last_ND: Tensor, *, mass_V: Tensor | None, chunk_rows: int = 256
) -> Tensor:
    """Log-sum-exp of the full-vocabulary logits, float32 [N]; adds the distributions to `mass_V`.

    Logits exist for `chunk_rows` rows at a time, probabilities for those of a row chunk.
    """
    lse_N = torch.empty(len(last_ND), dtype=torch.float32, device=last_ND.device)
    for start in range(0, len(last_ND), chunk_rows):
        logits_nV = target.logits(last_ND[start : start + chunk_rows])
        chunk_V = torch.zeros(logits_nV.shape[1], device=logits_nV.device)
        for rows in row_chunks(logits_nV):
            odds_nV = logits_nV[rows].float()
            top_n1 = odds_nV.amax(dim=1, keepdim=True)
            total_n = odds_nV.sub_(top_n1).exp_().sum(dim=1)
            lse_N[start + rows.start : start + rows.stop] = top_n1[:, 0] + total_n.log()
            if mass_V is not None:
                chunk_V += total_n.reciprocal() @ odds_nV
        if mass_V is not None:
            mass_V += chunk_V.to(mass_V)
    return lse_N


def token_mass(target: Target, answers: Sequence[Answer], *, num_answers: int = 200) -> Tensor:
    """The same mass over the first answers, float64 [V], for a run without a cache."""
    mass_V = torch.zeros(target.spec.vocab_size, dtype=torch.float64)
    online = OnlineStates(target, tap_layers=())
    for part in _passes(answers[:num_answers], 2560):
        for answer, states in zip(part, online.read(part), strict=True):
            sum_mass(target, states.last_ND[len(answer.prompt_token_ids) :], mass_V=mass_V)
    return mass_V


def _passes(answers: Sequence[Answer], tokens_per_pass: int) -> Iterator[list[Answer]]:
    """Answers in their order, gathered until a pass has its tokens."""
    part: list[Answer] = []
    num_tokens = 0
    for answer in answers:
        part.append(answer)
        num_tokens += len(answer.prompt_token_ids) + len(answer.token_ids)
        if num_tokens >= tokens_per_pass:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


def select_vocabulary(mass_V: Tensor, *, size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` target ids of largest mass (ties: lowest id), `always` among them, ascending."""
    score_V = mass_V.clone()
    for token in always:
        score_V[token] = float("inf")
    order_V = torch.sort(score_V, descending=True, stable=True).indices
    return order_V[:size].sort().values
