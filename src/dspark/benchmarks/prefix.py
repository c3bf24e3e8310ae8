"""`dspark bench prefix`: what the prefix cache saves, and that it changes nothing.

Requests that share a long system prompt go one after the other through an engine that keeps known
words and through one that does not, in turn. It measures from outside.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.algorithms.survival import AcceptanceStats
from dspark.benchmarks.environment import Environment, dtype_name
from dspark.benchmarks.workload import demo_prompts, many_prompts
from dspark.completion import Completion
from dspark.core import SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """What is asked."""

    requests: int = 50
    """Requests that share the system prompt."""
    system_tokens: int = 1000
    """Its length, about."""
    max_new_tokens: int = 32
    """Tokens of each answer."""
    temperature: float = 0.0
    """0 is greedy; above 0 each request has a seed."""
    seed: int = 0
    """Seed of the first request; the next one has the next number."""

    def __post_init__(self) -> None:
        for name in ("requests", "system_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """Both engines side by side; times to the first token in milliseconds, medians."""

    dtype: str
    temperature: float
    requests: int
    prompt_tokens: float
    """Mean of a request, the system prompt included."""
    cached_tokens: float
    """Mean of those that the cache knew; the first request, which it cannot know, is left out."""
    cold_ttft_ms: float
    warm_ttft_ms: float
    ratio: float
    """Cold over warm."""
    cold_tau: float | None
    warm_tau: float | None
    identical: int
    """Requests whose tokens are the same in both."""
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    llm: LLM,
    config: PrefixConfig,
    *,
    on_request: Callable[[int, int], None] | None = None,
) -> PrefixReport:
    """Ask everything twice; `on_request(done, total)` hears of progress.

    Raises `InputError` if the target's context is too short for the prompts.
    """
    warm = llm.with_config(replace(llm.config, prefix_cache=True))
    cold = llm.with_config(replace(llm.config, prefix_cache=False))
    chats = _chats(llm, config)
    for engine in (warm, cold):  # costs are measured, memory is touched
        engine.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=4))
    found: list[tuple[Completion, Completion]] = []
    for number, ids in enumerate(chats):
        params = SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_new_tokens,
            seed=None if config.temperature == 0 else config.seed + number,
        )
        found.append((cold.generate([ids], params)[0], warm.generate([ids], params)[0]))
        if on_request is not None:
            on_request(number + 1, len(chats))
    return _report(llm, config, found)


def _chats(llm: LLM, config: PrefixConfig) -> list[list[int]]:
    """Conversations as token ids: one system prompt, another question each."""
    tokenizer = llm.tokenizer
    told = " ".join(prompt.text for prompt in demo_prompts(15))
    ids = tokenizer.encode(told)
    system = tokenizer.decode(
        (ids * (config.system_tokens // len(ids) + 1))[: config.system_tokens]
    )
    topics = [prompt.text for prompt in many_prompts(32)]
    return [
        tokenizer.chat(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Question {n + 1}. {topics[n % len(topics)]}"},
            ]
        )
        for n in range(config.requests)
    ]


def _report(
    llm: LLM, config: PrefixConfig, found: Sequence[tuple[Completion, Completion]]
) -> PrefixReport:
    known = found[1:] or found  # the first one fills the cache
    cold_ms = 1e3 * statistics.median(cold.stats.prefill_s for cold, _ in known)
    warm_ms = 1e3 * statistics.median(warm.stats.prefill_s for _, warm in known)
    return PrefixReport(
        dtype=dtype_name(llm.target.dtype),
        temperature=config.temperature,
        requests=len(found),
        prompt_tokens=statistics.mean(len(warm.prompt_ids) for _, warm in found),
        cached_tokens=statistics.mean(warm.rounds[0].num_cached for _, warm in known),
        cold_ttft_ms=cold_ms,
        warm_ttft_ms=warm_ms,
        ratio=cold_ms / warm_ms,
        cold_tau=_tau([cold for cold, _ in found]),
        warm_tau=_tau([warm for _, warm in found]),
        identical=sum(list(cold.token_ids) == list(warm.token_ids) for cold, warm in found),
        environment=Environment.here(),
    )


def _tau(answers: Sequence[Completion]) -> float | None:
    return sum((answer.stats.acceptance for answer in answers), AcceptanceStats()).tau
