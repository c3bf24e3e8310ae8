"""What `dspark train` does between parsing and printing its last line. It knows no argv.

Loads, shows progress on a console, and joins processes where `torchrun` started several.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import distributed

from dspark import assembly
from dspark.data.answers import read_all_answers
from dspark.data.remote_states import serve_states
from dspark.dry_run import Amount, describe, dry_run
from dspark.errors import InputError, Stopped
from dspark.interrupts import polite_stop
from dspark.models.checkpoint import check_place
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.target_source import resolve_source
from dspark.recipes import Recipe
from dspark.text.tokenizer import Tokenizer
from dspark.training.plan import Plan
from dspark.training.progress import ProgressLine, describe_validation
from dspark.training.ranks import Group, OneProcess, Ranks, is_launched, launched
from dspark.training.tensorboard import TensorBoard
from dspark.training.trainer import StepReport
from dspark.training.validation import Validation
from dspark.training_session import (
    RunConfig,
    RunReport,
    StatesConfig,
    Watchers,
    tap_layers,
    train,
)

__all__ = ["StatesConfig", "TrainingCommand"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCommand:
    """The settings of one call."""

    answers: Sequence[Path]
    recipe: Recipe
    out: Path | None = None
    work: Path | None = None
    steps: int | None = None
    minutes: float | None = None
    init_from: Path | None = None
    target: str | None = None
    dtype: str | None = None
    threads: int | None = None
    is_compiled: bool = True
    tensorboard: Path | None = None
    parallel: str = "ddp"
    states: StatesConfig = field(default_factory=StatesConfig)

    def run(self, console: Console) -> RunReport | None:
        """Train; `None` on every process but the first."""
        run, rows = self._run_config(), self._rows()
        with ExitStack() as stack:
            place = _Place()
            if is_launched():
                stack.enter_context(launched())
                place = _place(self.states)
            elif self.states.states == "remote":
                raise InputError(
                    "States are remote, but this is the only process; start it with torchrun "
                    "--nproc-per-node 2 -m dspark train .., or take states online."
                )
            is_first = place.ranks.rank == 0 and not place.serves
            watchers, close = _watchers(console if is_first else None, self.tensorboard)
            stack.callback(close)
            should_stop = self._stop(watchers, stack)
            target = assembly.load_target(
                target=self.target,
                dtype=self.dtype,
                is_compiled=False,
                is_packed=None,
                threads=self.threads,
            )
            tokenizer = Tokenizer.load(resolve_source(target.spec.name))
            if place.serves:
                taps = tap_layers(target, tokenizer, self.recipe, run)
                serve_states(target, tap_layers=taps, trainers=place.trainers)
                return None
            if place.worker is not None:
                target.drop_layers()
            report = train(
                target,
                tokenizer,
                rows,
                recipe=self.recipe,
                run=run,
                watchers=_stopping(watchers, should_stop),
                ranks=place.ranks,
                worker=place.worker,
                should_stop=should_stop,
            )
        return report if is_first else None

    def plan(
        self,
        *,
        num_answers: int | None,
        prompt_tokens: float,
        answer_tokens: float,
        tera_flops: float | None,
    ) -> Plan:
        """What it would need; from the answers files, or from amounts where there are none."""
        if num_answers is None:
            amount = Amount.of(self._rows())
        else:
            amount = Amount(
                num_answers=num_answers, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens
            )
        return dry_run(
            DEFAULT_TARGET if self.target is None else self.target,
            recipe=self.recipe,
            amount=amount,
            steps=self.steps,
            minutes=self.minutes,
            states=self.states.states,
            cache_dtype=self.states.cache_dtype,
            dtype=self.dtype,
            tera_flops=tera_flops,
        )

    def describe(self, found: Plan) -> str:
        """The plan in a few lines."""
        return describe(found, states=self.states.states)

    def _stop(self, watchers: Watchers, stack: ExitStack) -> Callable[[], bool]:
        """Whether the user wants an end; processes that send states end at once, and so do all."""
        if self.states.states == "remote":
            return lambda: False
        notice = "stopping behind what is in hand; Ctrl-C once more stops at once"
        return stack.enter_context(polite_stop(lambda: watchers.say(notice)))

    def _rows(self) -> Sequence[Any]:
        if not self.answers:
            raise InputError(
                "No answers file was given; write one with `dspark prepare`, or plan with "
                "--dry-run and --num-answers."
            )
        return read_all_answers(self.answers)

    def _run_config(self) -> RunConfig:
        if self.out is None:
            raise InputError("--out is missing; give the directory that the drafter goes to.")
        check_place(self.out)
        return RunConfig(
            out=self.out,
            work=self.out.with_name(self.out.name + "-work") if self.work is None else self.work,
            steps=self.steps,
            minutes=self.minutes,
            init_from=self.init_from,
            parallel=self.parallel,
            is_compiled=self.is_compiled,
            states=self.states,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What this process does among those that were launched together."""

    ranks: Ranks = field(default_factory=OneProcess)
    """The trainers, seen from here."""
    worker: int | None = None
    """The process that sends states to this trainer."""
    serves: bool = False
    """Whether this is such a process itself."""
    trainers: Sequence[int] = ()
    """The ones it serves."""


def _place(states: StatesConfig) -> _Place:
    """All train, unless states are remote: then the last processes run the target."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if states.states != "remote":
        return _Place(ranks=Group())
    num_workers = states.target_workers
    num_trainers = size - num_workers
    if num_trainers < 1:
        raise InputError(
            f"target_workers is {num_workers}, but only {size} processes were started; one at "
            "least has to train."
        )
    group = distributed.new_group(list(range(num_trainers)))
    if rank >= num_trainers:
        mine = [t for t in range(num_trainers) if num_trainers + t % num_workers == rank]
        return _Place(serves=True, trainers=mine)
    return _Place(ranks=Group(group), worker=num_trainers + rank % num_workers)


def _watchers(
    console: Console | None, tensorboard: Path | None
) -> tuple[Watchers, Callable[[], None]]:
    """Who shows a run, and how to end that; nobody without a console."""
    if console is None:
        quiet = Watchers(
            say=lambda _: None,
            on_states=lambda *_: None,
            on_step=lambda _: None,
            on_validation=lambda *_: None,
        )
        return quiet, lambda: None
    curves = None if tensorboard is None else TensorBoard(tensorboard)
    screen = _Screen(console, curves)
    shown = Watchers(
        say=screen.say,
        on_states=lambda done, total: screen.bar("hidden states", done, total),
        on_step=screen.on_step,
        on_validation=screen.on_validation,
    )
    return shown, screen.close


def _stopping(watchers: Watchers, should_stop: Callable[[], bool]) -> Watchers:
    """The same, but a cache of states is left where it is once the user wants an end."""

    def on_states(done: int, total: int) -> None:
        watchers.on_states(done, total)
        if should_stop():
            raise Stopped(
                f"Stopped with the hidden states of {done} of {total} answers on the disk; the "
                "same command goes on from there."
            )

    return replace(watchers, on_states=on_states)


class _Screen:
    """Progress bars, a line every few seconds, and the curves."""

    def __init__(self, console: Console, curves: TensorBoard | None) -> None:
        self._curves = curves
        self._line = ProgressLine()
        self._bars: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._progress.start()

    def say(self, text: str) -> None:
        """One line above the bars."""
        self._progress.console.print(text, highlight=False)

    def bar(self, name: str, done: int, total: int) -> None:
        """Move a bar; the first call makes it."""
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=done)

    def on_step(self, report: StepReport) -> None:
        """A step is done."""
        self.bar("steps", report.step, report.num_steps)
        text = self._line.push(report)
        if text is not None:
            self.say(text)
        if self._curves is not None:
            self._curves.on_step(report)

    def on_validation(self, step: int, found: Validation) -> None:
        """Held-out figures are there."""
        self.say(describe_validation(step, found))
        if self._curves is not None:
            self._curves.on_validation(step, found)

    def close(self) -> None:
        """End the bars and the curves."""
        self._progress.stop()
        if self._curves is not None:
            self._curves.close()
