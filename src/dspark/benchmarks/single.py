"""`dspark bench single`: one user's speed in our engine and in others, in one run.

The same prompts as ids, the same number of new tokens, greedy, the same threads; engines take turns
within every round so that a slow minute of the machine meets all of them. It knows how to time an
engine, not how one works.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from dspark.benchmarks import peers
from dspark.benchmarks.environment import Environment, installed_version
from dspark.benchmarks.peers import Engine
from dspark.errors import DSparkError, InputError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleConfig:
    """How long and how often each engine answers."""

    rounds: int = 3
    """Times that every engine answers every prompt, at least 3."""
    max_new_tokens: int = 256
    """Tokens of each answer; end-of-text tokens do not stop it."""
    num_threads: int | None = None
    """Threads of each engine; all processors that this process may use if not given."""

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise InputError(f"rounds is {self.rounds}, but a spread needs at least 3.")
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, but it must be at least 2.")
        if self.num_threads is not None and self.num_threads < 1:
            raise InputError(f"threads is {self.num_threads}, but it must be at least 1.")

    @property
    def threads(self) -> int:
        """`num_threads`, or the processors of this process."""
        return self.num_threads or len(usable_processors())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """New tokens a second, prompt included in the time: over all prompts and rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The spread of at least one sample."""
        return cls(median=statistics.median(samples), min=min(samples), max=max(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's speed and what it ran."""

    name: str
    version: str
    config: Mapping[str, str]
    tokens_per_s: Speed
    same_text_as_dspark_plain: int
    """Prompts whose greedy ids equal those of dspark's plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleReport:
    """All engines of one run; `missing` maps a peer that is not installed to its pip command."""

    engines: Sequence[EngineReport]
    ratios: Mapping[str, float]
    missing: Mapping[str, str]
    num_threads: int
    prompt_tokens: Sequence[int]
    new_tokens: int
    ignores_eos: bool
    """Always: the counts are equal, the text after an end-of-text token is not ordinary text."""
    rounds: int
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed answer."""

    seconds: float
    token_ids: Sequence[int]


def usable_processors() -> list[int]:
    """Numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class Worker:
    """One engine in a process of its own, with its threads pinned; use as a context manager."""

    def __init__(self, engine: Engine, *, num_threads: int) -> None:
        self.engine = engine
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, engine, num_threads), daemon=True
        )
        with _thread_count(num_threads):
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()

    def wait_until_ready(self) -> None:
        """Block until the engine has loaded. Raises `ModelError` if it died instead."""
        self._receive()

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> Sample:
        """One timed answer of exactly `num_tokens` ids. Raises `ModelError` for anything else."""
        self._connection.send((list(prompt_ids), num_tokens))
        sample = self._receive()
        assert isinstance(sample, Sample)
        if len(sample.token_ids) != num_tokens:
            raise ModelError(
                f"Engine {self.engine.name} gave {len(sample.token_ids)} tokens instead of "
                f"{num_tokens}, so its speed is not comparable; no figure is reported."
            )
        return sample

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(timeout=10)
            raise ModelError(
                f"Engine {self.engine.name} failed (exit code {self._process.exitcode}); what it "
                "printed stands above, and no figure is reported."
            ) from error
        if isinstance(message, DSparkError):
            raise ModelError(f"Engine {self.engine.name} did not start: {message}")
        return message


def serve(connection: Connection, engine: Engine, num_threads: int) -> None:
    """The worker's own process: load, say so, answer until the other end closes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, usable_processors()[:num_threads])
    torch.set_num_threads(num_threads)
    try:
        generate = peers.build(engine, num_threads=num_threads)
    except DSparkError as error:  # a sentence for the user, not a crash
        connection.send(error)
        return
    connection.send("ready")
    while True:
        try:
            prompt_ids, num_tokens = connection.recv()
        except EOFError:
            return
        started = time.perf_counter()
        token_ids = list(generate(prompt_ids, num_tokens))
        seconds = time.perf_counter() - started
        connection.send(Sample(seconds=seconds, token_ids=token_ids))


def measure(
    engines: Sequence[Engine],
    prompts: Sequence[Sequence[int]],
    *,
    config: SingleConfig,
    on_round: Callable[[int, str, float], None] | None = None,
) -> SingleReport:
    """Time the installed ones of `engines`; `on_round(round, engine, tokens_per_s)` hears of it.

    Every engine answers one prompt untimed first. Raises `ModelError` if an engine fails.
    """
    present = [e for e in engines if e.package == "dspark" or installed_version(e.package)]
    missing = {e.name: e.install for e in engines if e not in present}
    samples: dict[str, list[Sample]] = {engine.name: [] for engine in present}
    with ExitStack() as stack:
        # one after the other: loading is heavy
        workers = [_started(engine, prompts[0], config, stack) for engine in present]
        for number in range(config.rounds):
            for prompt in prompts:
                for worker in workers:
                    sample = worker.answer(prompt, config.max_new_tokens)
                    samples[worker.engine.name].append(sample)
            for worker in workers if on_round is not None else ():
                assert on_round is not None
                last = samples[worker.engine.name][-len(prompts) :]
                on_round(number, worker.engine.name, _speed(last, config).median)
    return _report(
        [worker.engine for worker in workers], samples, prompts, missing=missing, config=config
    )


def _started(
    engine: Engine, prompt: Sequence[int], config: SingleConfig, stack: ExitStack
) -> Worker:
    """A worker that has answered once; with the engine's fallback if it died without."""
    worker = stack.enter_context(Worker(engine, num_threads=config.threads))
    try:
        worker.wait_until_ready()
        worker.answer(prompt, config.max_new_tokens)
    except ModelError:
        if engine.fallback is None:
            raise
        second = replace(engine, config={**engine.config, **engine.fallback}, fallback=None)
        return _started(second, prompt, config, stack)
    return worker


def _report(
    present: Sequence[Engine],
    samples: Mapping[str, Sequence[Sample]],
    prompts: Sequence[Sequence[int]],
    *,
    missing: Mapping[str, str],
    config: SingleConfig,
) -> SingleReport:
    plain = samples.get("dspark-plain", ())[: len(prompts)]
    reports = [
        EngineReport(
            name=engine.name,
            version=installed_version(engine.package) or "not installed",
            config=engine.config,
            tokens_per_s=_speed(samples[engine.name], config),
            same_text_as_dspark_plain=sum(
                mine.token_ids == theirs.token_ids
                for mine, theirs in zip(samples[engine.name], plain, strict=False)
            ),
        )
        for engine in present
    ]
    return SingleReport(
        engines=reports,
        ratios=_ratios({report.name: report.tokens_per_s.median for report in reports}),
        missing=missing,
        num_threads=config.threads,
        prompt_tokens=[len(prompt) for prompt in prompts],
        new_tokens=config.max_new_tokens,
        ignores_eos=True,
        rounds=config.rounds,
        environment=Environment.here(),
    )


def _speed(samples: Sequence[Sample], config: SingleConfig) -> Speed:
    return Speed.of([config.max_new_tokens / sample.seconds for sample in samples])


def _ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Ours over each peer, and speculative over plain."""
    ours = [name for name in medians if name.startswith("dspark")]
    theirs = [name for name in medians if not name.startswith("dspark")]
    ratios = {f"{us}/{them}": medians[us] / medians[them] for us in ours for them in theirs}
    if len(ours) == 2:
        ratios["dspark/dspark-plain"] = medians["dspark"] / medians["dspark-plain"]
    return ratios


@contextmanager
def _thread_count(num_threads: int) -> Iterator[None]:
    """Thread pools of C libraries read their size once, from the environment of their process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(num_threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
