"""`dspark bench exact`: over many prompts, is every answer with a drafter the plain one?

Token for token, at several batch sizes and with requests that come and go; a single difference is
named, with how close the choice was. It knows answers, no arithmetic.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dspark.algorithms.survival import AcceptanceStats
from dspark.benchmarks import audit
from dspark.benchmarks.audit import Divergence
from dspark.benchmarks.environment import Environment
from dspark.completion import Job, Prompt
from dspark.core import SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM

MIXED = "mixed"
"""A batch that requests join and leave at different steps, some of them with fewer drafts or none.
"""
_ARRIVALS = (0, 0, 0, 1, 2)  # requests that a step of a mixed batch may find waiting
_WIDTHS = (None, 0, 1, 3)  # drafts that its requests allow, in turn

OnProgress = Callable[[str, int, int], None]
"""Hears of `(run, answers done, answers in all)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessConfig:
    """What is decoded, and how often."""

    max_new_tokens: int = 256
    """Tokens of each answer, at most."""
    temperatures: Sequence[float] = (0.0, 1.0)
    """Above 0 each prompt has a seed: then the text is a function of seed, prompt and target."""
    batches: Sequence[str] = ("1", "4", "16", MIXED)
    """Requests decoded together with a drafter, or `mixed`."""
    reference_batch: int = 16
    """Requests decoded together plainly: the text that all others must repeat."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text tokens, so that every answer has its full length."""
    seed: int = 0
    """Seed of the first prompt; the next one has the next number."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "reference_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        for name in ("temperatures", "batches"):
            if not getattr(self, name):
                raise InputError(f"{name} is empty, which would prove nothing; name one at least.")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)
        for batch in self.batches:
            if batch != MIXED and not (batch.isdecimal() and int(batch) > 0):
                raise InputError(
                    f"batch is {batch!r}, but it must be a number above 0, or {MIXED}."
                )

    @property
    def most_requests(self) -> int:
        """Of the engine, so that each batch runs as large as it is called; a mixed one has 16."""
        return max(16, self.reference_batch, *(int(b) for b in self.batches if b != MIXED))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDivergence:
    """The first prompt of a run whose answer differs, and where."""

    prompt: int
    """Counted from 0."""
    divergence: Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One pass over all prompts."""

    arithmetic: str
    temperature: float
    batch: str
    identical: int
    total: int
    tokens: int
    drafted: int
    """Drafted tokens that were verified: with none the run proves nothing (UC-015)."""
    tau: float | None
    """Tokens committed per round: near 1 the run proves little."""
    seconds: float
    first_divergence: FirstDivergence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessReport:
    """All runs; `identical` says that nothing differed anywhere."""

    runs: Sequence[RunReport]
    identical: bool
    conclusive: bool
    """Whether drafts were verified in every run."""
    prompts: int
    max_new_tokens: int
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    arithmetic: str,
    config: ExactnessConfig,
    on_progress: OnProgress | None = None,
) -> list[RunReport]:
    """Every temperature and batch of `config` for one LLM with a drafter.

    `arithmetic` is its name in the report.
    """
    assert llm.drafter is not None
    reports = []
    for temperature in config.temperatures:
        name = f"{arithmetic}, T={temperature:g}"
        jobs = _jobs(prompts, temperature, config)
        plain = _decode(
            llm,
            jobs,
            batch=str(config.reference_batch),
            speculation=False,
            on_progress=_named(on_progress, f"{name}, plain"),
        )
        for batch in config.batches:
            drafted = _decode(
                llm,
                jobs,
                batch=batch,
                speculation=True,
                on_progress=_named(on_progress, f"{name}, batch {batch}"),
            )
            reports.append(
                RunReport(
                    arithmetic=arithmetic,
                    temperature=temperature,
                    batch=batch,
                    identical=sum(drafted.ids[job.key] == plain.ids[job.key] for job in jobs),
                    total=len(jobs),
                    tokens=sum(len(ids) for ids in drafted.ids.values()),
                    drafted=drafted.acceptance.num_planned,
                    tau=drafted.acceptance.tau,
                    seconds=drafted.seconds,
                    first_divergence=_first_divergence(llm, jobs, plain.ids, drafted.ids),
                )
            )
    return reports


def report_of(
    runs: Sequence[RunReport], *, num_prompts: int, config: ExactnessConfig
) -> ExactnessReport:
    """The runs of all arithmetics put together."""
    return ExactnessReport(
        runs=runs,
        identical=all(run.identical == run.total for run in runs),
        conclusive=all(run.drafted > 0 for run in runs),
        prompts=num_prompts,
        max_new_tokens=config.max_new_tokens,
        environment=Environment.here(),
    )


def _jobs(prompts: Sequence[Prompt], temperature: float, config: ExactnessConfig) -> list[Job]:
    return [
        Job(
            key=str(number),
            prompt=prompt,
            params=SamplingParams(
                temperature=temperature,
                max_tokens=config.max_new_tokens,
                ignore_eos=config.ignore_eos,
                seed=None if temperature == 0 else config.seed + number,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(slots=True)
class _Decoded:
    """Answers by key, and what they took."""

    ids: dict[str, Sequence[int]] = field(default_factory=dict)
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: float = 0.0


def _decode(
    llm: LLM,
    jobs: Sequence[Job],
    *,
    batch: str,
    speculation: bool,
    on_progress: Callable[[int, int], None],
) -> _Decoded:
    is_mixed = batch == MIXED
    size = llm.config.max_requests if is_mixed else int(batch)
    engine = LLM(
        llm.target,
        tokenizer=llm.tokenizer,
        drafter=llm.drafter if speculation else None,
        config=replace(llm.config, max_requests=size),
        policy=llm.policy,
        calibration=llm.calibration,
    )
    line = _Line([_narrowed(job, i) for i, job in enumerate(jobs)] if is_mixed else jobs, is_mixed)
    decoded, started = _Decoded(), time.perf_counter()
    for job, answer in engine.drain(line.take, speculation=speculation):
        line.num_running -= 1
        decoded.ids[job.key] = list(answer.token_ids)
        decoded.acceptance += answer.stats.acceptance
        on_progress(len(decoded.ids), len(jobs))
    decoded.seconds = time.perf_counter() - started
    return decoded


class _Line:
    """Jobs as they arrive: all at once, or some at a time by a fixed draw."""

    def __init__(self, jobs: Sequence[Job], is_mixed: bool) -> None:
        self._jobs = deque(jobs)
        self._draw = random.Random(0) if is_mixed else None
        self._num_due = 0
        self.num_running = 0

    def take(self) -> Job | None:
        """The next job, if one has arrived; there is always one for an idle engine."""
        if not self._jobs:
            return None
        if self._draw is not None and self.num_running > 0:
            if self._num_due == 0:
                self._num_due = self._draw.choice(_ARRIVALS) + 1
            self._num_due -= 1
            if self._num_due == 0:
                return None  # no more in this step
        self.num_running += 1
        return self._jobs.popleft()


def _narrowed(job: Job, number: int) -> Job:
    params = replace(job.params, max_draft=_WIDTHS[number % len(_WIDTHS)])
    return replace(job, params=params)


def _first_divergence(
    llm: LLM,
    jobs: Sequence[Job],
    plain: Mapping[str, Sequence[int]],
    drafted: Mapping[str, Sequence[int]],
) -> FirstDivergence | None:
    for number, job in enumerate(jobs):
        divergence = audit.compare(
            llm.target,
            prompt_ids=llm.prompt_ids(job.prompt),
            plain_ids=plain[job.key],
            dspark_ids=drafted[job.key],
            params=job.params,
            block_size=llm.block_size,
        )
        if divergence is not None:
            return FirstDivergence(prompt=number, divergence=divergence)
    return None


def _named(on_progress: OnProgress | None, name: str) -> Callable[[int, int], None]:
    return lambda done, total: on_progress(name, done, total) if on_progress is not None else None
