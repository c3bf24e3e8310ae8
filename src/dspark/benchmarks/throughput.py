"""`dspark bench throughput`: many users at once, in our engine and in others, in one run.

A closed batch: all requests come together, and the clock runs until the last one has its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.benchmarks import race
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.peers import Engine
from dspark.benchmarks.race import Places, RaceConfig, Speed
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's tokens a second, all requests together, by the number of requests as text."""

    name: str
    version: str
    config: Mapping[str, str]
    tokens_per_s: Mapping[str, Speed]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputReport:
    """All engines of one run; `ratios` by the number of requests."""

    engines: Sequence[EngineReport]
    ratios: Mapping[str, Mapping[str, float]]
    missing: Mapping[str, str]
    num_threads: int
    prompt_tokens: Sequence[int]
    new_tokens: int
    rounds: int
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    engines: Sequence[Engine],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: Sequence[int],
    source: str,
    config: RaceConfig,
    places: Places | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_round: Callable[[int, str, float], None] | None = None,
) -> ThroughputReport:
    """Time every engine on the first `n` prompts together, for each `n` of `concurrency`.

    Callbacks and errors are those of `race.run`. Raises `InputError` for more requests than
    prompts: a repeated prompt would not be computed twice everywhere.
    """
    if not concurrency or min(concurrency) < 1 or max(concurrency) > len(prompts):
        raise InputError(
            f"concurrency is {list(concurrency)}, but each must lie in 1..{len(prompts)}, the "
            "number of different prompts."
        )
    found = race.run(
        engines,
        {str(size): prompts[:size] for size in concurrency},
        source=source,
        config=config,
        places=Places() if places is None else places,
        on_ready=on_ready,
        on_round=on_round,
    )
    reports = [
        EngineReport(
            name=entrant.engine.name,
            version=entrant.version,
            config=entrant.engine.config,
            tokens_per_s={
                size: Speed.of([sample.tokens_per_s for sample in samples])
                for size, samples in entrant.samples.items()
            },
        )
        for entrant in found.entrants
    ]
    families = {entrant.engine.name: entrant.engine.family for entrant in found.entrants}
    return ThroughputReport(
        engines=reports,
        ratios={
            str(size): race.ratios(
                {report.name: report.tokens_per_s[str(size)].median for report in reports},
                families,
            )
            for size in concurrency
        },
        missing=found.missing,
        num_threads=config.threads,
        prompt_tokens=[len(prompt) for prompt in prompts[: max(concurrency)]],
        new_tokens=config.max_new_tokens,
        rounds=config.rounds,
        environment=Environment.here(),
    )
