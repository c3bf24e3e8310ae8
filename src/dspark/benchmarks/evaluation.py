"""`dspark evaluate`: accepted length of drafters on prompts that they were not trained on.

It knows prompts and counts; what a drafter is inside, it does not know.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.algorithms.survival import AcceptanceStats
from dspark.core import Coupling, SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM, Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the prompts are answered."""

    temperature: float = 0.0
    """0 is greedy; above 0 each prompt has a seed."""
    max_new_tokens: int = 128
    """Tokens of each answer, at most."""
    batch_size: int = 8
    """Prompts answered together; the counts do not depend on it, the speed does."""
    seed: int = 0
    """Seed of the first prompt of a task; the next one has the next number."""
    coupling: Coupling = Coupling.MAXIMAL
    """How draft and target are drawn together above temperature 0: maximal or shared-noise."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One drafter on one task; shares are between 0 and 1."""

    num_prompts: int
    tau: float
    """Committed over rounds, all rounds of all prompts (the first token, which no round
    drafted, left out)."""
    tau_ci95: float
    """Half the width of a 95% interval of the mean of the prompts' own tau."""
    acceptance_planned: float
    acceptance_offered: float
    conditional: Sequence[float]
    """At k: accepted among the rounds that accepted 1..k-1 and verified k."""
    tokens_per_s: float
    """All answers of the task over wall-clock, `batch_size` prompts at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterReport:
    """One drafter over all tasks."""

    macro_tau: float
    """Mean of the tasks' tau, each task weighing the same."""
    tasks: Mapping[str, TaskReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The whole run."""

    temperature: float
    drafters: Mapping[str, DrafterReport]

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


Chats = Sequence[Sequence[Mapping[str, str]]]
"""Conversations that end with a user turn."""


def evaluate(
    llm: LLM,
    tasks: Mapping[str, Chats],
    *,
    config: EvaluationConfig,
    on_batch: Callable[[str, int, int], None] | None = None,
) -> DrafterReport:
    """Answer every task with the drafter of `llm`; `on_batch(task, done, total)` hears of it.

    Raises `InputError` if nothing was drafted: then there is nothing to evaluate.
    """
    reports = {name: _task(llm, name, chats, config, on_batch) for name, chats in tasks.items()}
    macro_tau = statistics.fmean(report.tau for report in reports.values())
    return DrafterReport(macro_tau=macro_tau, tasks=reports)


def _task(
    llm: LLM,
    name: str,
    chats: Chats,
    config: EvaluationConfig,
    on_batch: Callable[[str, int, int], None] | None,
) -> TaskReport:
    answers: list[Completion] = []
    seconds = 0.0
    for start in range(0, len(chats), config.batch_size):
        batch = chats[start : start + config.batch_size]
        params = [_params(config, start + offset) for offset in range(len(batch))]
        started = time.perf_counter()
        answers.extend(llm.generate(batch, params))
        seconds += time.perf_counter() - started
        if on_batch is not None:
            on_batch(name, len(answers), len(chats))
    each = [answer.stats.acceptance for answer in answers]
    total = sum(each, AcceptanceStats())
    if total.num_offered == 0 or total.tau is None:
        raise InputError(
            f"Nothing was drafted in task {name!r}, so there is no accepted length to report; "
            "load a drafter and allow at least 2 new tokens."
        )
    return TaskReport(
        num_prompts=len(answers),
        tau=total.tau,
        tau_ci95=_half_width([stats.tau for stats in each if stats.tau is not None]),
        acceptance_planned=total.acceptance_planned or 0.0,
        acceptance_offered=total.acceptance_offered or 0.0,
        conditional=[share or 0.0 for share in total.conditional_acceptance],
        tokens_per_s=sum(len(answer.token_ids) for answer in answers) / seconds,
    )


def _params(config: EvaluationConfig, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        max_tokens=config.max_new_tokens,
        seed=None if config.temperature == 0 else config.seed + index,
        coupling=config.coupling,
    )


def _half_width(taus: Sequence[float]) -> float:
    if len(taus) < 2:
        return 0.0
    return 1.96 * statistics.stdev(taus) / math.sqrt(len(taus))
