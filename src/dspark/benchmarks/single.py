"""`dspark bench single`: one user's speed in our engine and in others, in one run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.benchmarks import race
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.peers import Engine
from dspark.benchmarks.race import Entrant, Places, RaceConfig, Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine's speed and what it ran."""

    name: str
    version: str
    config: Mapping[str, str]
    tokens_per_s: Speed
    same_text_as_dspark_plain: int | None
    """Prompts whose greedy ids equal those of dspark's plain decoding in the same arithmetic, or
    in the first one for a peer. `None` if that did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleReport:
    """All engines of one run; `missing` maps a peer that is not installed to its command."""

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


def measure(
    engines: Sequence[Engine],
    prompts: Sequence[Sequence[int]],
    *,
    source: str,
    config: RaceConfig,
    places: Places | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_round: Callable[[int, str, float], None] | None = None,
) -> SingleReport:
    """Time every engine on one prompt after the other; `source` is the target.

    Callbacks and errors are those of `race.run`.
    """
    found = race.run(
        engines,
        {str(number): [prompt] for number, prompt in enumerate(prompts)},
        source=source,
        config=config,
        places=Places() if places is None else places,
        on_ready=on_ready,
        on_round=on_round,
    )
    reports = [_report(entrant, found.entrants) for entrant in found.entrants]
    return SingleReport(
        engines=reports,
        ratios=race.ratios(
            {report.name: report.tokens_per_s.median for report in reports},
            {entrant.engine.name: entrant.engine.family for entrant in found.entrants},
        ),
        missing=found.missing,
        num_threads=config.threads,
        prompt_tokens=[len(prompt) for prompt in prompts],
        new_tokens=config.max_new_tokens,
        ignores_eos=True,
        rounds=config.rounds,
        environment=Environment.here(),
    )


def _report(entrant: Entrant, everyone: Sequence[Entrant]) -> EngineReport:
    rates = [sample.tokens_per_s for found in entrant.samples.values() for sample in found]
    return EngineReport(
        name=entrant.engine.name,
        version=entrant.version,
        config=entrant.engine.config,
        tokens_per_s=Speed.of(rates),
        same_text_as_dspark_plain=_same_texts(entrant, everyone),
    )


def _same_texts(entrant: Entrant, everyone: Sequence[Entrant]) -> int | None:
    plain = [other for other in everyone if other.engine.name.startswith("dspark-plain")]
    arithmetic = entrant.engine.config.get("arithmetic")
    alike = [other for other in plain if other.engine.config["arithmetic"] == arithmetic]
    if not plain:
        return None
    reference = (alike or plain)[0].samples
    return sum(
        entrant.samples[task][0].token_ids == reference[task][0].token_ids for task in reference
    )
