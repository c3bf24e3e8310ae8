"""`dspark bench step`: what one target pass costs by its number of tokens, beside the floor.

It times the target alone (layers, head, attention over a filled cache); no drafter, no sampling.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from dspark.benchmarks.environment import Environment, dtype_name
from dspark.benchmarks.passes import Passes
from dspark.benchmarks.prefill import prefills
from dspark.errors import InputError
from dspark.kernels.linear import PackedLinear
from dspark.kernels.memory import Stream
from dspark.models.target import Target

_CONTEXT_TOKEN = 11  # any id: the cost does not depend on the text
_TURN = 3
_SETTLE_S = 0.1  # untimed passes before the timed ones of a turn
_STREAM = ("stream", 0)
_ONE, _MANY = "one request", "many requests"

Name = TypeVar("Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Which passes are timed, and how often."""

    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Tokens in a pass: of one request, and one token each of as many requests."""
    context: int = 256
    """Positions of each request that are in the cache already."""
    prefill: int = 512
    """Tokens of the prompt whose first pass is timed, where a plain target is given."""
    repeats: int = 36
    """Timed passes of each size, in turns of three; medians count. Of a prompt, a quarter."""
    warmup: int = 3
    """Passes of each size before the clock runs."""

    def __post_init__(self) -> None:
        for name in ("context", "prefill", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if min(self.sizes, default=0) < 1:
            raise InputError(f"sizes is {tuple(self.sizes)}, but each must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Milliseconds of a pass; keys of the two tables are the sizes as text."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    stream_bytes_per_s: float
    """Bytes a second read, the median of the turns: as many as the weights are, lying as they do
    (huge pages), by all threads with vector loads."""
    weight_bytes: int
    """Bytes of the weights that every pass must read."""
    floor_ms: float
    """weight_bytes / stream_bytes_per_s: what reading the weights takes."""
    context: int
    one_request_ms: dict[str, float]
    many_requests_ms: dict[str, float]
    first_over_floor: float
    """One request's smallest pass over reading the weights. This ratio and the next two are those
    of each turn, whose passes stand side by side, and of them the median: a machine that is faster
    at memory in one minute and at products in another moves times, and quotients of their medians,
    more than these."""
    one_request_over_first: dict[str, float]
    """One request's pass over its smallest."""
    many_requests_over_one: dict[str, float]
    """One token each of so many requests over as many tokens of one."""
    prefill_ms: dict[str, float]
    """A prompt of `prefill` tokens over an empty cache, by path (see `prefill.prefills`)."""
    prefill: int
    plain_dtype: str | None
    """Of the paths of PyTorch and transformers; `None` if no prefill was timed."""
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    target: Target,
    *,
    quantization: str | None,
    config: StepConfig,
    plain: Target | None = None,
    on_size: Callable[[str, int, float], None] | None = None,
) -> StepReport:
    """Time every size in both shapes; `on_size(shape, size, milliseconds)` hears of each median.

    `plain` is the same target unpacked; without it no prefill is timed. Raises `InputError` for
    more positions than the target has.
    """
    room = config.context + max(config.sizes)
    if room > target.spec.max_positions:
        raise InputError(
            f"context is {config.context}, but with a pass of {max(config.sizes)} tokens behind it "
            f"that is more than the {target.spec.max_positions} positions of target "
            f"{target.spec.name}; lower it."
        )
    weight_bytes = streamed_bytes(target)
    stream = Stream(weight_bytes)
    one = Passes(target, num_requests=1, num_positions=room)
    many = Passes(target, num_requests=max(config.sizes), num_positions=config.context + 1)
    one.fill(seed=0)
    many.fill(seed=0)
    runs: dict[tuple[str, int], Callable[[], object]] = {_STREAM: stream.read}
    for size in config.sizes:
        alone, each = [[_CONTEXT_TOKEN] * size], [[_CONTEXT_TOKEN]] * size
        runs[_ONE, size] = one.prepare(alone, start=config.context)
        runs[_MANY, size] = many.prepare(each, start=config.context)
    turns = _turns_ms(runs, config.repeats, warmup=config.warmup)
    prompt = [_CONTEXT_TOKEN] * config.prefill
    prompts = {} if plain is None else prefills(target, plain, prompt)
    prefill_turns = _turns_ms(prompts, -(-config.repeats // 4), warmup=min(1, config.warmup))
    medians = {name: statistics.median(found) for name, found in turns.items()}
    prefill_ms = {name: statistics.median(found) for name, found in prefill_turns.items()}
    if on_size is not None:
        for (shape, size), milliseconds in medians.items():
            if (shape, size) != _STREAM:
                on_size(shape, size, milliseconds)
        for name, milliseconds in prefill_ms.items():
            on_size(f"prefill, {name}", config.prefill, milliseconds)

    def ratio(above: tuple[str, int], below: tuple[str, int]) -> float:
        pairs = zip(turns[above], turns[below], strict=True)
        return statistics.median(a / b for a, b in pairs)

    sizes, first = config.sizes, (_ONE, config.sizes[0])
    stream_bytes_per_s = 1e3 * stream.num_bytes / medians[_STREAM]
    return StepReport(
        dtype=dtype_name(target.dtype),
        quantization=quantization,
        kv_cache_dtype=dtype_name(target.kv_dtype),
        stream_bytes_per_s=stream_bytes_per_s,
        weight_bytes=weight_bytes,
        floor_ms=1e3 * weight_bytes / stream_bytes_per_s,
        context=config.context,
        one_request_ms={str(size): medians[_ONE, size] for size in sizes},
        many_requests_ms={str(size): medians[_MANY, size] for size in sizes},
        first_over_floor=ratio(first, _STREAM) * stream.num_bytes / weight_bytes,
        one_request_over_first={str(size): ratio((_ONE, size), first) for size in sizes},
        many_requests_over_one={str(size): ratio((_MANY, size), (_ONE, size)) for size in sizes},
        prefill_ms=prefill_ms,
        prefill=config.prefill,
        plain_dtype=None if plain is None else dtype_name(plain.dtype),
        environment=Environment.here(),
    )


def streamed_bytes(target: Target) -> int:
    """Bytes of all weights and buffers of the model; a shared one counts once.

    The embedding is left out unless the head multiplies by that very memory: a pass reads only
    the rows of its own tokens.
    """
    tensors = {t.data_ptr(): t for t in (*target.model.parameters(), *target.model.buffers())}
    head = target.model.get_output_embeddings()
    multiplied = head.packed if isinstance(head, PackedLinear) else head.weight
    if multiplied.data_ptr() != target.embed_weight_VD.data_ptr():
        tensors.pop(target.embed_weight_VD.data_ptr(), None)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _turns_ms(
    runs: Mapping[Name, Callable[[], object]], repeats: int, *, warmup: int
) -> dict[Name, list[float]]:
    """Medians of each turn. Sizes take turns, so that a slow minute of the machine meets them all;
    a turn is a few passes behind untimed ones, so that each finds caches and clock as it would
    leave them: for tens of milliseconds behind a large pass a small one is up to a quarter
    slower."""
    turns: dict[Name, list[float]] = {name: [] for name in runs}
    for name in [name for name in runs for _ in range(warmup)]:
        runs[name]()
    for start in range(0, repeats, _TURN):
        for name, run in runs.items():
            _settle(run)
            times = []
            for _ in range(min(_TURN, repeats - start)):
                started = time.perf_counter()
                run()
                _synchronize()
                times.append(1e3 * (time.perf_counter() - started))
            turns[name].append(statistics.median(times))
    return turns


def _settle(run: Callable[[], object]) -> None:
    ends = time.perf_counter() + _SETTLE_S
    run()
    _synchronize()
    while time.perf_counter() < ends:
        run()
        _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
