"""`dspark bench cycle`: which part of a step is spent outside the operators, in Python.

Two engines take the same steps in turn: one with nothing but a clock around a step, one in which
every operator is timed on its own. What a step of the first takes beyond the operators of the
second is bookkeeping. It decides nothing about how steps are made.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dspark.benchmarks.environment import Environment, dtype_name
from dspark.core import Request, SamplingParams
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.errors import InputError
from dspark.kernels.draft_round import DraftRound
from dspark.kernels.stack import FusedStack
from dspark.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleBenchConfig:
    """Which steps are timed, and how many."""

    num_requests: Sequence[int] = (1, 16, 64)
    """Requests in flight, each with drafting and without."""
    prompt_tokens: int = 32
    """Length of every prompt; it has been read before the clock runs."""
    steps: int = 24
    """Timed steps."""
    warmup: int = 4
    """Steps after the prompts and before the clock runs."""
    params: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.0, ignore_eos=True)
    )
    """Of every request; `max_tokens` is set to what the steps may need."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if min(self.num_requests, default=0) < 1:
            raise InputError(
                f"num_requests is {tuple(self.num_requests)}, but each must be at least 1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleRow:
    """The timed steps of one number of requests: medians, but for the means of operators."""

    num_requests: int
    is_drafting: bool
    tokens_per_step: float
    step_ms: float
    operators_ms: dict[str, float]
    """Milliseconds a step inside each operator, the largest first."""
    num_calls: float
    """Operator calls a step."""
    outside_share: float
    """What a step takes beyond its operators: bookkeeping, Python, calling."""

    @property
    def outside_ms(self) -> float:
        """Milliseconds a step outside the operators."""
        return self.step_ms * self.outside_share


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleReport:
    """Where the time of a step goes."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    rows: Sequence[CycleRow]
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    target: Target,
    *,
    drafter: DraftSource | None,
    quantization: str | None,
    config: CycleBenchConfig,
    on_row: Callable[[CycleRow], None] | None = None,
) -> CycleReport:
    """Time every number of requests with `drafter`, if there is one, and without."""
    rows = []
    for num_requests in config.num_requests:
        for each in (drafter, None) if drafter is not None else (None,):
            rows.append(_measure_row(target, each, num_requests, config))
            if on_row is not None:
                on_row(rows[-1])
    return CycleReport(
        dtype=dtype_name(target.dtype),
        quantization=quantization,
        kv_cache_dtype=dtype_name(target.kv_dtype),
        rows=rows,
        environment=Environment.here(),
    )


class _OperatorClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seconds inside each operator, as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[str, float] = {}
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return self._timed(str(func.overloadpacket), partial(func, *args, **(kwargs or {})))

    def __enter__(self) -> Self:
        # these are methods of C++ objects, which PyTorch's dispatcher does not see
        self._watched = [
            self._watch(FusedStack, "dspark.stack"),
            self._watch(DraftRound, "dspark.draft_round"),
        ]
        for watched in self._watched:
            watched.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for watched in self._watched:
            watched.stop()

    def _watch(self, owner: Any, name: str) -> Any:
        run = owner.run
        return patch.object(
            owner,
            "run",
            lambda it, *args, **rest: self._timed(
                name, partial(self._unseen, run, it, *args, **rest)
            ),
        )

    def _timed(self, name: str, call: Callable[[], object]) -> object:
        started = time.perf_counter()
        result = call()
        passed = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + passed
        self.num_calls += 1
        return result

    @staticmethod
    def _unseen(call: Callable[..., object], *args: object, **rest: object) -> object:
        with _disable_current_modes():
            return call(*args, **rest)


def _measure_row(
    target: Target, drafter: DraftSource | None, num_requests: int, config: CycleBenchConfig
) -> CycleRow:
    """Two cycles in lockstep, so that what else the machine does falls on both."""
    plain = _filled_cycle(target, drafter, num_requests, config)
    watched = _filled_cycle(target, drafter, num_requests, config)
    clock = _OperatorClock()
    num_tokens, steps_s, outside_s = 0, [], []
    for _ in range(config.steps):
        started = time.perf_counter()
        result = plain.step()
        steps_s.append(time.perf_counter() - started)
        num_tokens += sum(len(item.token_ids) for item in result.rounds)
        before = sum(clock.seconds.values())
        with clock:
            watched.step()
        outside_s.append(steps_s[-1] - (sum(clock.seconds.values()) - before))
    ranked = sorted(clock.seconds.items(), key=lambda item: -item[1])
    step_s = statistics.median(steps_s)
    return CycleRow(
        num_requests=num_requests,
        is_drafting=drafter is not None,
        tokens_per_step=num_tokens / config.steps,
        step_ms=1e3 * step_s,
        operators_ms={name: 1e3 * seconds / config.steps for name, seconds in ranked},
        num_calls=clock.num_calls / config.steps,
        outside_share=statistics.median(outside_s) / step_s,
    )


def _filled_cycle(
    target: Target, drafter: DraftSource | None, num_requests: int, config: CycleBenchConfig
) -> Cycle:
    """A cycle whose requests have all read their prompts and decoded for a few steps."""
    block_size = block_size_of(drafter)
    max_tokens = (block_size + 1) * (config.steps + config.warmup) + 2
    length = config.prompt_tokens + max_tokens + block_size
    if length > target.spec.max_positions:
        raise InputError(
            f"{config.steps} steps need {length} positions, but {target.spec.name} takes "
            f"{target.spec.max_positions}; time fewer steps."
        )
    page_size = CycleConfig().page_size
    cycle = Cycle(
        target,
        drafter=drafter,
        config=CycleConfig(
            max_requests=num_requests,
            num_positions=num_requests * -(-length // page_size) * page_size,
            max_step_tokens=num_requests * max(config.prompt_tokens, block_size + 1),
        ),
    )
    fields = {name: getattr(config.params, name) for name in config.params.__slots__}
    params = SamplingParams(**{**fields, "max_tokens": max_tokens})
    for index in range(num_requests):
        first = 7 * index + 3
        prompt = [(first + 11 * i) % target.spec.vocab_size for i in range(config.prompt_tokens)]
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    for _ in range(1 + config.warmup):
        cycle.step()
    return cycle
