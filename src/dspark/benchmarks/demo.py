"""`dspark demo`: the same prompts with plain decoding and with DSpark, by the same engine.

It measures from outside and compares token for token; it knows no terminal.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from dspark.algorithms.survival import AcceptanceStats
from dspark.benchmarks import audit
from dspark.benchmarks.audit import Divergence
from dspark.benchmarks.environment import Environment, dtype_name
from dspark.benchmarks.workload import Prompt, demo_prompts
from dspark.completion import Completion, Piece
from dspark.core import Origin, SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo runs."""

    num_prompts: int = 12
    """Prompts, math, code and chat in turn; at most 15."""
    max_new_tokens: int = 128
    """Tokens of each answer; the end-of-text token is held back until then."""
    temperature: float = 0.0
    """0 is greedy; above 0 each prompt has a seed and both decodings share its noise."""
    repeats: int = 2
    """Timed answers of each kind for every prompt, in turn; the median counts."""
    seed: int = 0
    """Seed of the first prompt; the next one has the next number."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        demo_prompts(self.num_prompts)
        SamplingParams(temperature=self.temperature, seed=self.seed)

    def params(self, index: int) -> SamplingParams:
        """How the prompt of this number is answered, plain and drafted alike."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            min_tokens=self.max_new_tokens,
            seed=None if self.temperature == 0 else self.seed + index,
        )


class Verdict(StrEnum):
    """What the comparison of the texts says."""

    IDENTICAL = "identical"
    EXPLAINED = "identical up to explained near ties"
    DIFFERENT = "DIFFERENT"
    UNSTABLE = "TARGET NOT DETERMINISTIC"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def is_pass(self) -> bool:
        """Whether losslessness was shown."""
        return self in (Verdict.IDENTICAL, Verdict.EXPLAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """One prompt, both ways. Rates are answer tokens over wall-clock, the prompt included."""

    domain: str
    prompt: str
    plain_tokens_per_s: float
    dspark_tokens_per_s: float
    speedup: float
    tau: float
    acceptance: float
    """Accepted over verified drafted tokens."""
    copied: float
    """Share of the answer that was copied from its own text and accepted."""
    new_tokens: int
    identical: bool
    divergence: Divergence | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainRow:
    """One line of the table: sums of its prompts."""

    domain: str
    num_prompts: int
    plain_tokens_per_s: float
    dspark_tokens_per_s: float
    speedup: float
    tau: float
    acceptance: float
    copied: float
    num_identical: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """The whole run."""

    dtype: str
    temperature: float
    prompts: Sequence[PromptReport]
    domains: Sequence[DomainRow]
    median_speedup: float
    tau: float
    identical: bool
    """Whether every answer is the same token for token."""
    verdict: Verdict
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


class Watcher(Protocol):
    """Whoever follows a demo while it runs."""

    def on_prompt(self, number: int, total: int, prompt: Prompt) -> None:
        """A prompt begins."""

    def on_answer(self, *, is_dspark: bool) -> None:
        """An answer to it begins to stream."""

    def on_piece(self, piece: Piece) -> None:
        """Some of the answer."""

    def on_result(self, report: PromptReport) -> None:
        """The prompt is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    completion: Completion
    seconds: float


def run(llm: LLM, config: DemoConfig, *, watcher: Watcher | None = None) -> DemoReport:
    """Answer every prompt plain and with DSpark, in turn, and compare.

    With a watcher both answers are streamed to it first, untimed.
    """
    prompts = demo_prompts(config.num_prompts)
    chats = [llm.tokenizer.chat([{"role": "user", "content": p.text}]) for p in prompts]
    _warm_up(llm, chats[0], config)
    reports, total, is_stable = [], AcceptanceStats(), True
    timed: list[tuple[list[_Timed], list[_Timed]]] = []
    for index, (prompt, ids) in enumerate(zip(prompts, chats, strict=True)):
        params = config.params(index)
        if watcher is not None:
            watcher.on_prompt(index + 1, len(prompts), prompt)
            _show(llm, ids, params, watcher)
        plain, dspark = _measure(llm, ids, params, repeats=config.repeats)
        timed.append((plain, dspark))
        report = _prompt_report(llm, prompt, ids, params, plain, dspark)
        reports.append(report)
        is_stable &= len({tuple(t.completion.token_ids) for t in plain}) == 1
        total += dspark[0].completion.stats.acceptance
        if watcher is not None:
            watcher.on_result(report)
    return DemoReport(
        dtype=dtype_name(llm.target.dtype),
        temperature=config.temperature,
        prompts=reports,
        domains=_domain_rows(reports, timed),
        median_speedup=statistics.median(report.speedup for report in reports),
        tau=total.tau or 0.0,
        identical=all(report.identical for report in reports),
        verdict=_verdict(reports, num_offered=total.num_offered, is_stable=is_stable),
        environment=Environment.here(),
    )


def _warm_up(llm: LLM, ids: Sequence[int], config: DemoConfig) -> None:
    params = config.params(0)
    for speculation in (False, True):
        llm.generate([ids], params, speculation=speculation)


def _show(llm: LLM, ids: Sequence[int], params: SamplingParams, watcher: Watcher) -> None:
    for is_dspark in (False, True):
        watcher.on_answer(is_dspark=is_dspark)
        for piece in llm.stream(ids, params, speculation=is_dspark):
            watcher.on_piece(piece)


def _measure(
    llm: LLM, ids: Sequence[int], params: SamplingParams, *, repeats: int
) -> tuple[list[_Timed], list[_Timed]]:
    plain, dspark = [], []
    for _ in range(repeats):
        plain.append(_timed(llm, ids, params, speculation=False))
        dspark.append(_timed(llm, ids, params, speculation=True))
    return plain, dspark


def _timed(llm: LLM, ids: Sequence[int], params: SamplingParams, *, speculation: bool) -> _Timed:
    started = time.perf_counter()
    completion = llm.generate([ids], params, speculation=speculation)[0]
    return _Timed(completion=completion, seconds=time.perf_counter() - started)


def _prompt_report(
    llm: LLM,
    prompt: Prompt,
    ids: Sequence[int],
    params: SamplingParams,
    plain: Sequence[_Timed],
    dspark: Sequence[_Timed],
) -> PromptReport:
    divergences = [
        audit.compare(
            llm.target,
            prompt_ids=ids,
            plain_ids=plain[0].completion.token_ids,
            dspark_ids=answer,
            params=params,
            block_size=llm.block_size,
        )
        for answer in {tuple(t.completion.token_ids) for t in dspark}
    ]
    found = [d for d in divergences if d is not None]
    stats = dspark[0].completion.stats.acceptance
    plain_rate, dspark_rate = _rate(plain), _rate(dspark)
    return PromptReport(
        domain=prompt.domain,
        prompt=prompt.text,
        plain_tokens_per_s=plain_rate,
        dspark_tokens_per_s=dspark_rate,
        speedup=dspark_rate / plain_rate,
        tau=stats.tau or 0.0,
        acceptance=stats.acceptance_planned or 0.0,
        copied=_num_copied(dspark[0]) / max(len(dspark[0].completion.token_ids), 1),
        new_tokens=len(dspark[0].completion.token_ids),
        identical=not found,
        divergence=min(found, key=lambda d: d.explained, default=None),
    )


def _num_copied(answer: _Timed) -> int:
    return answer.completion.origins.count(Origin.COPIED)


def _rate(answers: Sequence[_Timed]) -> float:
    seconds = statistics.median(answer.seconds for answer in answers)
    return len(answers[0].completion.token_ids) / seconds


def _verdict(reports: Sequence[PromptReport], *, num_offered: int, is_stable: bool) -> Verdict:
    if num_offered == 0:
        return Verdict.INCONCLUSIVE
    if not is_stable:
        return Verdict.UNSTABLE
    if all(report.identical for report in reports):
        return Verdict.IDENTICAL
    divergences = [report.divergence for report in reports if report.divergence is not None]
    return Verdict.EXPLAINED if all(d.explained for d in divergences) else Verdict.DIFFERENT


def _domain_rows(
    reports: Sequence[PromptReport], timed: Sequence[tuple[list[_Timed], list[_Timed]]]
) -> list[DomainRow]:
    by_domain: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        by_domain.setdefault(report.domain, []).append(index)
    return [
        _domain_row(domain, [reports[i] for i in members], [timed[i] for i in members])
        for domain, members in by_domain.items()
    ]


def _domain_row(
    domain: str,
    reports: Sequence[PromptReport],
    timed: Sequence[tuple[list[_Timed], list[_Timed]]],
) -> DomainRow:
    stats = sum((dspark[0].completion.stats.acceptance for _, dspark in timed), AcceptanceStats())
    num_tokens = sum(report.new_tokens for report in reports)
    plain_s = sum(r.new_tokens / r.plain_tokens_per_s for r in reports)
    dspark_s = sum(r.new_tokens / r.dspark_tokens_per_s for r in reports)
    return DomainRow(
        domain=domain,
        num_prompts=len(reports),
        plain_tokens_per_s=num_tokens / plain_s,
        dspark_tokens_per_s=num_tokens / dspark_s,
        speedup=plain_s / dspark_s,
        tau=stats.tau or 0.0,
        acceptance=stats.acceptance_planned or 0.0,
        copied=sum(_num_copied(dspark[0]) for _, dspark in timed) / max(num_tokens, 1),
        num_identical=sum(report.identical for report in reports),
    )
