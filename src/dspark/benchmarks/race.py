"""Engines that take turns at the same tasks, so that a slow minute of the machine meets them all.

Same prompts as ids, same number of new tokens, greedy, same threads. It knows tasks and turns; what
an engine is called and how it works is known elsewhere.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dspark.benchmarks import peer_setup
from dspark.benchmarks.peer_weights import model_path
from dspark.benchmarks.peers import Engine
from dspark.benchmarks.worker import Sample, Worker
from dspark.errors import InputError
from dspark.machine import num_processors

Prompts = Sequence[Sequence[int]]

_PAGE = 64
_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceConfig:
    """How long and how often each engine answers."""

    rounds: int = 3
    """Times that every engine does every task; fewer than 3 show no spread."""
    max_new_tokens: int = 256
    """Tokens of each answer; end-of-text tokens do not stop it."""
    num_threads: int | None = None
    """Threads of each engine; all processors that this process may use if not given."""

    def __post_init__(self) -> None:
        for name, least in (("rounds", 1), ("max_new_tokens", 2), ("num_threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}, but it must be at least {least}.")
        if (self.num_threads or 1) > num_processors():
            raise InputError(
                f"num_threads is {self.num_threads}, but it must lie in 1..{num_processors()}, the "
                "processors that this process may use."
            )

    @property
    def threads(self) -> int:
        """`num_threads`, or the processors of this process."""
        return self.num_threads or len(usable_processors())


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """New tokens a second, prompts included in the time: over all samples."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """The spread of at least one sample."""
        return cls(median=statistics.median(samples), min=min(samples), max=max(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where engines and their weights lie."""

    pythons: Mapping[str, Path] = field(default_factory=dict)
    """Pythons that the user gave, by family."""
    folder: Path = field(default_factory=peer_setup.peers_folder)
    """Environments and converted weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """An engine that took part."""

    engine: Engine
    version: str
    samples: Mapping[str, Sequence[Sample]]
    """By task, round after round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What happened; `missing` maps engines that are not installed to the command for it."""

    entrants: Sequence[Entrant]
    missing: Mapping[str, str]


def run(
    engines: Sequence[Engine],
    tasks: Mapping[str, Prompts],
    *,
    source: str,
    config: RaceConfig,
    places: Places,
    on_ready: Callable[[str], None] | None = None,
    on_round: Callable[[int, str, float], None] | None = None,
) -> Race:
    """Time the installed ones of `engines` on each task: prompts that run together.

    Every engine first does a short task of each size untimed. `on_ready(engine)` hears of loaded
    engines, `on_round(round, engine, tokens_per_s)` of the median over a round's tasks. Raises
    `ModelError` if an engine fails: a crash is no slow run.
    """
    pythons = {
        engine.name: peer_setup.python_of(engine.family, given=places.pythons, folder=places.folder)
        for engine in engines
    }
    missing = {
        engine.name: peer_setup.install_command(engine.family)
        for engine in engines
        if pythons[engine.name] is None
    }
    present = [engine for engine in engines if engine.name not in missing]
    models = {  # all before the first process: converting takes memory and every core
        engine.name: model_path(
            engine.weights,
            source,
            python=pythons[engine.name] or Path(),
            cache=places.folder / "weights",
        )
        for engine in present
    }
    samples: dict[str, dict[str, list[Sample]]] = {
        engine.name: {task: [] for task in tasks} for engine in present
    }
    workers, versions = {}, {}
    with ExitStack() as stack:
        for engine in present:  # one after the other: loading is heavy
            python = pythons[engine.name]
            assert python is not None
            settings = _settings(engine, models[engine.name], tasks, config)
            worker = stack.enter_context(Worker(engine.name, python, settings))
            versions[engine.name] = worker.wait_until_ready()
            for prompts in {len(prompts): prompts for prompts in tasks.values()}.values():
                worker.answer(prompts, min(config.max_new_tokens, _WARM_TOKENS))
            workers[engine.name] = worker
            if on_ready is not None:
                on_ready(engine.name)
        for number in range(config.rounds):
            for task, prompts in tasks.items():
                for name, worker in workers.items():
                    samples[name][task].append(worker.answer(prompts, config.max_new_tokens))
            for name in workers if on_round is not None else ():
                assert on_round is not None
                rates = [found[-1].tokens_per_s for found in samples[name].values()]
                on_round(number, name, statistics.median(rates))
    entrants = [
        Entrant(engine=engine, version=versions[engine.name], samples=samples[engine.name])
        for engine in present
    ]
    return Race(entrants=entrants, missing=missing)


def ratios(speeds: Mapping[str, float], families: Mapping[str, str]) -> dict[str, float]:
    """Ours over each peer, drafted over plain in the same arithmetic, and family over family.

    `speeds` by engine; `families` says whose it is. A family's name stands for its fastest
    configuration: "dspark/openvino" is our fastest over OpenVINO's fastest.
    """
    ours = [name for name in speeds if families[name] == "dspark"]
    theirs = [name for name in speeds if families[name] != "dspark"]
    best = {
        family: max(speeds[name] for name in theirs if families[name] == family)
        for family in dict.fromkeys(families[name] for name in theirs)
    }
    found: dict[str, float] = {}
    for us in _fastest_of_ours(speeds, ours):
        for family, speed in best.items():
            found[f"{us[0]}/{family}"] = us[1] / speed
    for name in ours:
        found |= {f"{name}/{them}": speeds[name] / speeds[them] for them in theirs}
        plain = name.replace("dspark-", "dspark-plain-")
        if not name.startswith("dspark-plain") and plain in speeds:
            found[f"{name}/{plain}"] = speeds[name] / speeds[plain]
    return found


def _fastest_of_ours(speeds: Mapping[str, float], ours: Sequence[str]) -> list[tuple[str, float]]:
    plain = [speeds[name] for name in ours if name.startswith("dspark-plain")]
    drafted = [speeds[name] for name in ours if not name.startswith("dspark-plain")]
    groups = (("dspark", drafted), ("dspark-plain", plain))
    return [(name, max(values)) for name, values in groups if values]


def _settings(
    engine: Engine, model: str, tasks: Mapping[str, Prompts], config: RaceConfig
) -> dict[str, Any]:
    peer = peer_setup.PEERS.get(engine.family)
    longest = max(len(prompt) for prompts in tasks.values() for prompt in prompts)
    positions = -(-(longest + config.max_new_tokens + _PAGE) // _PAGE) * _PAGE
    return {
        **engine.settings,
        "engine": engine.family,
        "packages": [engine.family] if peer is None else list(peer.packages),
        "model": model,
        "num_threads": config.threads,
        "max_requests": max(len(prompts) for prompts in tasks.values()),
        "max_positions": positions,
    }


def usable_processors() -> list[int]:
    """Numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
