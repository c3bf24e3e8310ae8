"""`dspark evaluate`: drafters on prompts they were not trained on, every answer generated anew.

It knows prompts and rounds; what a drafter is inside, it does not know. What the rounds say is
computed in `evaluation_report`.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.benchmarks.evaluation_report import DrafterShape, EvaluationReport, report_of
from dspark.benchmarks.journal import PLAIN, Cell, Journal, PromptRecord
from dspark.completion import Job
from dspark.core import Coupling, SamplingParams
from dspark.engine.prompt_lookup import PromptLookup
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.models.drafter_config import DrafterKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the prompts are answered."""

    temperatures: Sequence[float] = (0.0,)
    """0 is greedy; above 0 each prompt has a seed. Give it several times to measure several."""
    widths: Sequence[int | None] = (None,)
    """Drafted tokens verified in a round at most, the whole block by default; several times:
    the effect of the block size in serving."""
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
        for width in self.widths:
            if width is not None and width < 1:
                raise InputError(f"width is {width}, but it must be at least 1.")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)
        if not self.temperatures or not self.widths:
            raise InputError("An evaluation needs at least one temperature and one width.")


Chat = Sequence[Mapping[str, str]] | str
"""A conversation that ends with a user turn, or a text to be continued as it is."""

Chats = Sequence[Chat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A drafter to be evaluated; it is loaded when its turn comes and dropped afterwards."""

    weights: str
    """Hash of its files."""
    load: Callable[[], LLM]


OnPrompt = Callable[[str, int, int], None]
"""Hears of (what is measured, prompts done, prompts in all)."""


def evaluate(
    contenders: Mapping[str, Contender],
    tasks: Mapping[str, Chats],
    *,
    config: EvaluationConfig,
    journal: Journal,
    has_plain: bool = False,
    on_prompt: OnPrompt | None = None,
) -> EvaluationReport:
    """Answer every task with every drafter at every temperature and width, once each.

    What the journal holds already is not measured again. With `has_plain` the target also answers
    alone, for the speed to compare with. Raises `InputError` before anything runs for a prompt
    that does not fit or a width beyond a block, and if a drafter drafted nothing: then there is
    nothing to evaluate.
    """
    records: list[PromptRecord] = []
    shapes: dict[str, DrafterShape] = {}
    is_plain_due = has_plain
    for name, contender in contenders.items():
        llm = contender.load()
        if llm.config.copies:  # what a drafter draws is measured
            llm = llm.with_config(replace(llm.config, copies=False))
        shapes[name] = _shape(llm)
        _check_fit(llm, tasks)
        _check_widths(name, llm.block_size, config)
        if is_plain_due:  # any of them has the target
            cells = _cells(PLAIN, "", config, widths=(None,))
            records += _run_cells(llm, cells, tasks, config, journal, on_prompt, speculation=False)
            is_plain_due = False
        cells = _cells(name, contender.weights, config, widths=config.widths)
        found = _run_cells(llm, cells, tasks, config, journal, on_prompt, speculation=True)
        if not any(sum(record.offered) for record in found):
            raise InputError(
                f"Drafter {name!r} drafted nothing, so there is no accepted length to report; "
                "give a drafter and allow at least 2 new tokens."
            )
        records += found
    return report_of(records, shapes)


def settings_of(llm: LLM, config: EvaluationConfig) -> dict[str, Any]:
    """What all lines of a results file share; drafters, tasks and conditions may be added."""
    values = asdict(config)
    for name in ("temperatures", "widths"):
        del values[name]
    spec = llm.target.spec
    return {
        **values,
        "target": spec.name,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(llm.target.kv_dtype).removeprefix("torch."),
        "device": llm.target.device.type,
    }


def _shape(llm: LLM) -> DrafterShape:
    size = llm.block_size
    if isinstance(llm.drafter, PromptLookup) or llm.drafter is None:
        return DrafterShape(kind="prompt-lookup", layers=None, block_size=size, width=size)
    config = llm.drafter.config
    is_headless = config.kind is DrafterKind.DSPARK and config.markov_rank == 0
    return DrafterShape(
        kind="dflash" if is_headless else config.kind.value,
        layers=config.num_hidden_layers,
        block_size=size,
        width=size,
    )


def _cells(
    name: str, weights: str, config: EvaluationConfig, *, widths: Sequence[int | None]
) -> list[Cell]:
    return [
        Cell(drafter=name, weights=weights, temperature=temperature, width=width, task="")
        for temperature in config.temperatures
        for width in widths
    ]


def _run_cells(
    llm: LLM,
    cells: Sequence[Cell],
    tasks: Mapping[str, Chats],
    config: EvaluationConfig,
    journal: Journal,
    on_prompt: OnPrompt | None,
    *,
    speculation: bool,
) -> list[PromptRecord]:
    records = []
    for condition in cells:
        for task, chats in tasks.items():
            cell = Cell(**{**asdict(condition), "task": task})
            records += _run_cell(llm, cell, chats, config, journal, on_prompt, speculation)
    return records


def _run_cell(
    llm: LLM,
    cell: Cell,
    chats: Chats,
    config: EvaluationConfig,
    journal: Journal,
    on_prompt: OnPrompt | None,
    speculation: bool,
) -> list[PromptRecord]:
    hashes = [_hash(chat) for chat in chats]
    found = {
        index: record
        for index, prompt in enumerate(hashes)
        if (record := journal.find(cell, index=index, prompt=prompt)) is not None
    }
    todo = [index for index in range(len(chats)) if index not in found]
    in_flight = 0

    def take() -> Job | None:
        nonlocal in_flight
        if not todo or in_flight >= config.batch_size:
            return None
        in_flight += 1
        index = todo.pop(0)
        return Job(key=str(index), prompt=chats[index], params=_params(config, cell, index))

    before = time.perf_counter()
    for job, completion in llm.drain(take, speculation=speculation):
        in_flight -= 1
        now, index = time.perf_counter(), int(job.key)
        record = PromptRecord.of(
            cell, completion, index=index, prompt=hashes[index], seconds=now - before
        )
        journal.add(record)
        found[index], before = record, now
        if on_prompt is not None:
            on_prompt(_title(cell), len(found), len(chats))
    return [found[index] for index in sorted(found)]


def _title(cell: Cell) -> str:
    width = "" if cell.width is None else f", width {cell.width}"
    return f"{cell.drafter}{width}, T={cell.temperature:g}, {cell.task}"


def _params(config: EvaluationConfig, cell: Cell, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=cell.temperature,
        max_tokens=config.max_new_tokens,
        max_draft=cell.width,
        seed=None if cell.temperature == 0 else config.seed + index,
        coupling=config.coupling,
    )


def _check_widths(name: str, block_size: int, config: EvaluationConfig) -> None:
    for width in config.widths:
        if width is not None and width > block_size:
            raise InputError(
                f"width is {width}, but drafter {name!r} drafts {block_size} tokens a block; "
                "give a width up to that."
            )


def _check_fit(llm: LLM, tasks: Mapping[str, Chats]) -> None:
    limit = llm.target.spec.max_positions
    for task, chats in tasks.items():
        for index, chat in enumerate(chats):
            length = len(llm.prompt_ids(chat))
            if length >= limit:
                raise InputError(
                    f"Prompt {index + 1} of task {task!r} has {length} tokens, but "
                    f"{llm.target.spec.name} takes {limit} with the answer; take it out."
                )


def _hash(chat: Chat) -> str:
    plain = chat if isinstance(chat, str) else list(map(dict, chat))
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
