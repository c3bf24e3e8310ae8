"""One run of `dspark bench load` or `dspark simulate`: model, prompts, files, report.

It joins the parts; what is measured and how is in `benchmarks.load` and `benchmarks.simulation`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dspark import assembly
from dspark.algorithms.calibration import Calibration
from dspark.algorithms.foreign_costs import read_cost
from dspark.algorithms.policies import Adaptive, parse_policy
from dspark.artifacts import read_object
from dspark.benchmarks.environment import Environment, dtype_name
from dspark.benchmarks.evaluation import Chat
from dspark.benchmarks.load.config import Load, LoadConfig, Unit
from dspark.benchmarks.load.deck import Task
from dspark.benchmarks.load.engines import LocalEngines
from dspark.benchmarks.load.report import LoadReport, Prediction, runs_of
from dspark.benchmarks.load.results import LoadResults
from dspark.benchmarks.load.sweep import OnUnit, Sweep
from dspark.benchmarks.simulation.prediction import SweepPrediction
from dspark.benchmarks.simulation.recording import (
    Recording,
    read_records,
    recordings_of,
)
from dspark.benchmarks.simulation.simulate import Machine
from dspark.benchmarks.workload import demo_prompts
from dspark.errors import InputError
from dspark.llm import LLM, shipped_drafter
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.gguf import default_cache

_NUM_BUILT_IN = 15
_PREDICTED_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFiles:
    """Where a sweep keeps what it finds."""

    results: Path | None
    """`None`: in the cache until everything is measured."""
    record: Path | None
    """Takes the rounds that `dspark simulate` reads."""


DomainChat = tuple[str, Chat]


def read_chats(sources: Sequence[str], *, limit: int | None) -> list[DomainChat]:
    """Prompts and their domains: `limit` of each domain of the files, or the built-in ones."""
    if sources:
        tasks = assembly.read_tasks(sources, limit=limit)
        return [(domain, chat) for domain, chats in tasks.items() for chat in chats]
    number = _NUM_BUILT_IN if limit is None else min(3 * limit, _NUM_BUILT_IN)
    return [(prompt.domain, prompt.text) for prompt in demo_prompts(number)]


def tasks_of(llm: LLM, chats: Sequence[DomainChat]) -> list[Task]:
    """The same as ids; a text is a chat of one turn where the target has a template."""
    return [
        Task(
            domain=domain,
            prompt_ids=assembly.prompt_of(llm, chat, system=None, is_raw=False)
            if isinstance(chat, str)
            else llm.prompt_ids(chat),
        )
        for domain, chat in chats
    ]


def check_record(path: Path) -> None:
    """Raises `InputError` where the rounds would take the place of a file of another kind."""
    if path.is_file():
        try:
            read_records([path])
        except InputError as error:
            raise InputError(
                f"{path} is there and holds no recorded rounds; name another file with --record."
            ) from error


def drafter_hash(target: str | None, drafter: str | None) -> str:
    """Tells the drafter of a command by its files."""
    if drafter in (None, "auto"):
        drafter = str(shipped_drafter(DEFAULT_TARGET if target is None else target))
    return assembly.weights_hash(str(drafter))


def run_sweep(
    llm: LLM,
    tasks: Sequence[Task],
    *,
    config: LoadConfig,
    weights: str,
    quantization: str | None,
    files: LoadFiles,
    on_unit: OnUnit | None = None,
) -> LoadReport:
    """Measure what is not measured yet, and report on all of it. `weights`: of the drafter."""
    assembly.require_drafter(llm)
    settings = _settings(llm, tasks, config, weights, quantization)
    results = LoadResults(
        _results_path(settings, config) if files.results is None else files.results,
        settings=settings,
    )
    if _weighs_costs(config):
        llm.step_cost()  # measured now if it never was: no load shall wait for it
    engines = LocalEngines(llm, tasks=tasks, config=config, weights=weights)
    sweep = Sweep(engines=engines, tasks=tasks, config=config, results=results)
    is_complete = sweep.run(on_unit=on_unit)
    if files.record is not None:
        lines = [json.dumps(asdict(answer.record)) + "\n" for answer in results.answers]
        files.record.write_text("".join(lines), encoding="utf-8")
    predict, predict_live = _predictions(llm, results, config)
    report = LoadReport(
        target=llm.target.spec.name,
        dtype=dtype_name(llm.target.dtype),
        quantization=quantization,
        kv_cache_dtype=dtype_name(llm.target.kv_dtype),
        block_size=llm.block_size,
        num_prompts=len(tasks),
        max_new_tokens=config.max_new_tokens,
        is_complete=is_complete,
        runs=runs_of(
            results.units,
            temperatures=config.temperatures,
            policies=config.policies,
            loads=config.loads,
            predict=predict,
            predict_live=predict_live,
        ),
        environment=Environment.here(),
    )
    if is_complete and files.results is None:
        results.path.unlink()
    return report


def _weighs_costs(config: LoadConfig) -> bool:
    return any(isinstance(parse_policy(policy), Adaptive) for policy in config.policies)


def _predictions(
    llm: LLM, results: LoadResults, config: LoadConfig
) -> tuple[Prediction | None, Prediction | None]:
    """From profiles taken beside the loads, and from that of before as `auto` corrected it; `None`
    where no policy needed step costs: none were measured then."""
    if not _weighs_costs(config):
        return None, None
    machines = {
        temperature: Machine(
            cost=llm.step_cost(),
            recording=Recording.of(
                answer.record
                for answer in sorted(results.answers, key=lambda answer: answer.record.index)
                if answer.record.cell.temperature == temperature
            ),
            calibration=llm.calibration,
        )
        for temperature in config.temperatures
    }
    fewer = replace(config, repeats=min(config.repeats, _PREDICTED_REPEATS))
    profiles = {sitting: tables[-1:] for sitting, tables in results.profiles.items()}
    predict = SweepPrediction(machines=machines, config=fewer, work=results.work, costs=profiles)
    return predict, replace(predict, costs=results.costs) if results.costs else None


def _settings(
    llm: LLM,
    tasks: Sequence[Task],
    config: LoadConfig,
    weights: str,
    quantization: str | None,
) -> dict[str, Any]:
    """What all units of a results file share; loads, policies and repeats may be added."""
    prompts = json.dumps([[task.domain, list(task.prompt_ids)] for task in tasks])
    return {
        "target": llm.target.spec.name,
        "drafter": weights,
        "dtype": dtype_name(llm.target.dtype),
        "quantization": quantization,
        "kv_cache_dtype": dtype_name(llm.target.kv_dtype),
        "device": llm.target.device.type,
        "threads": torch.get_num_threads(),
        "copies": llm.config.copies,
        "max_new_tokens": config.max_new_tokens,
        "answers": "whole",
        "max_step_tokens": config.max_step_tokens,
        "seed": config.seed,
        "coupling": config.coupling.value,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest()[:16],
    }


def _results_path(settings: Mapping[str, Any], config: LoadConfig) -> Path:
    """In the cache, where only the same command finds it again."""
    loads = [asdict(load) for load in config.loads]
    key = [settings, loads, config.policies, config.temperatures, config.repeats, config.unit_s]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return default_cache() / "loads" / f"{name}.jsonl"


def read_machine(
    records: Sequence[Path],
    *,
    cost: Path,
    calibration: Path | None,
    temperature: float | None,
) -> Machine:
    """What `dspark simulate` simulates, from files.

    Raises `InputError` if the recorded rounds have no such temperature, or several and none is
    chosen; `ModelError` for a table that cannot be read.
    """
    found = recordings_of(read_records(records))
    if temperature is None and len(found) > 1:
        raise InputError(
            f"These rounds were recorded at temperatures {', '.join(f'{t:g}' for t in found)}; "
            "choose one with --temperature."
        )
    chosen = next(iter(found)) if temperature is None else temperature
    if chosen not in found:
        raise InputError(
            f"temperature is {chosen:g}, but these rounds were recorded at "
            f"{', '.join(f'{t:g}' for t in found)}."
        )
    recording = found[chosen]
    return Machine(
        cost=read_cost(read_object(cost), block_size=recording.block_size),
        recording=recording,
        calibration=None
        if calibration is None
        else Calibration.from_json(read_object(calibration)),
    )


def unit_sentence(unit: Unit, tokens_per_s: float, done: int, total: int) -> str:
    """One finished measurement in a line."""
    return (
        f"{done}/{total}  T={unit.temperature:g} {_load_words(unit.load)} {unit.policy}: "
        f"{tokens_per_s:.1f} tokens/s"
    )


def _load_words(load: Load) -> str:
    return f"{load.name} {'users' if load.kind == 'closed' else 'requests/s'}"
