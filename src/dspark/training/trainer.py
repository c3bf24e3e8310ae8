"""The training loop: batches in, a drafter out, resumable at any kill.

It knows no answers, no command line and prints nothing: `on_step` and `on_validation` see what
happens. Batches are functions of the step, so a resumed run repeats the loss curve bit for bit on
the same machine and thread count (UC-118).

Letters: M taps, K block_size.
"""

import dataclasses
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dspark.algorithms import losses
from dspark.errors import InputError, ModelError, NumericsError, Stopped
from dspark.training.block_pass import BlockPass
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig, Outcome, TargetHead
from dspark.training.optimizer import Optimizer, OptimizerConfig, schedule
from dspark.training.ranks import OneProcess, Ranks
from dspark.training.sharded_pass import ShardedPass
from dspark.training.slot_pass import Batch, SlotPass
from dspark.training.snapshot import read_snapshot, write_snapshot
from dspark.training.validation import Validation, validate

_CALIBRATION_STEPS = 6
_SCALE_STEPS = 4


class BatchSource(Protocol):
    """What is trained on; `data.batches.AnswerBatches` has it."""

    def step(self, step: int) -> Sequence[Batch]:
        """Micro-batches of step 0, 1, ..: a function of the number alone."""
        ...

    def held_out(self) -> Iterable[Batch]:
        """The same held-out batches each time; may be empty."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """Name to value of what must be the same for a resumed run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long and by what rule; what is read belongs to the batch source."""

    steps: int | None = None
    minutes: float | None = None
    """One of the two: minutes are turned into steps once, by timing a few, and kept on resume."""
    validate_every: int = 100
    """Steps between two measurements on held-out answers."""
    checkpoint_every: int = 50
    """Steps between two checkpoints."""
    is_continued: bool = False
    """The drafter comes trained: its weights, measured first, are the ones to beat (UC-119)."""
    parallel: str = "ddp"
    """What several ranks hold: ddp, each the whole drafter; fsdp2, each a shard of it."""
    is_compiled: bool = True
    """Compile the elementwise part of the loss where a C++ compiler is at hand."""
    objective: ObjectiveConfig = ObjectiveConfig()  # noqa: RUF009  # frozen
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise InputError(
                f"steps is {self.steps!r} and minutes is {self.minutes!r}; give exactly one."
            )
        if self.parallel not in ("ddp", "fsdp2"):
            raise InputError(f"parallel is {self.parallel!r}, but it must be ddp or fsdp2.")
        for name in ("steps", "minutes", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value!r}, but it must be above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did."""

    step: int
    """Steps done, this one included."""
    num_steps: int
    loss: float
    gradient_norm: float
    learning_rate_factor: float
    num_slots: int
    """Supervised slots."""
    accepted_K: tuple[float, ...]
    """Sum of 1 - TV over the slots at each position; 0 without a target."""
    slots_K: tuple[float, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """The last line of `dspark train`."""

    steps: int
    supervised_tokens: int
    tokens_per_s: float
    peak_memory_bytes: int
    held_out_tau: float
    """Of the best weights, which are the ones that are kept."""
    best_step: int


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What of a run is neither weights nor optimiser; saved with them."""

    num_steps: int | None = None
    step: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    supervised_tokens: int = 0
    train_s: float = 0.0


class Trainer:
    """One run, in one folder: `training.pt` to resume from, `best.pt` the best weights so far."""

    def __init__(
        self,
        drafter: nn.Module,
        *,
        batches: BatchSource,
        config: TrainConfig,
        folder: str | Path,
        target_head: TargetHead | None = None,
        ranks: Ranks | None = None,
        on_step: Callable[[StepReport], None] | None = None,
        on_validation: Callable[[int, Validation], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.drafter = drafter
        self.config = config
        self._ranks = OneProcess() if ranks is None else ranks
        self.slot_pass: SlotPass = slot_pass_of(drafter)
        if config.parallel == "fsdp2" and self._ranks.group is not None:
            self.slot_pass = ShardedPass(self.slot_pass, group=self._ranks.group)
        self.folder = Path(folder)
        self._batches = batches
        self._on_step = on_step
        self._on_validation = on_validation
        self._should_stop = should_stop
        self._optimizer = Optimizer(drafter, config=config.optimizer, ranks=self._ranks)
        head = TargetHead() if target_head is None else target_head
        self._objective = Objective(
            self.slot_pass,
            config=config.objective,
            target_head=head,
            kernel=compiled_kernel(config.objective.weights) if config.is_compiled else None,
        )
        self._measure = self._objective
        if not config.objective.weights.needs_target:  # held-out acceptance does in any case
            weights = dataclasses.replace(config.objective.weights, l1=1.0)
            measured = dataclasses.replace(config.objective, weights=weights)
            self._measure = Objective(self.slot_pass, config=measured, target_head=head)
        self._progress = _Progress(num_steps=config.steps)
        self._input_scale_M: Tensor | None = None

    def run(self) -> TrainSummary:
        """Train to the end of the budget, from the last checkpoint if there is one.

        Afterwards the drafter holds the weights of the best held-out accepted length, ready to
        save. A value that is not finite raises `NumericsError` naming tensor and step; the
        checkpoint then still is the last good one (UC-115). Once `should_stop()` says yes on any
        rank, the step in hand is saved and `Stopped` raised.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._resume():
            self._input_scale_M = self._measured_input_scale()
            if self.config.is_continued:
                self._start_from_drafter(self._input_scale_M)
            if self._progress.num_steps is None:
                self._progress.num_steps = self._calibrated_num_steps()
            self._save()
        progress = self._progress
        assert progress.num_steps is not None
        while progress.step < progress.num_steps:
            report = self._step(progress.step)
            if self._on_step is not None:
                self._on_step(report)
            is_last = progress.step == progress.num_steps
            if is_last or progress.step % self.config.validate_every == 0:
                self._validate()
            is_stopped = not is_last and self._ranks.largest(float(self._should_stop())) > 0
            if is_last or is_stopped or progress.step % self.config.checkpoint_every == 0:
                self._save()
            if is_stopped:
                raise Stopped(
                    f"Stopped behind step {progress.step} of {progress.num_steps}; the same "
                    "command goes on from there."
                )
        self._ranks.wait()
        self._optimizer.load_masters(self.best_masters())
        return TrainSummary(
            steps=progress.num_steps,
            supervised_tokens=progress.supervised_tokens,
            tokens_per_s=progress.supervised_tokens / max(progress.train_s, 1e-9),
            peak_memory_bytes=peak_memory_bytes(),
            held_out_tau=progress.best_tau,
            best_step=progress.best_step,
        )

    def draft(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Blocks [A, K] that the drafter as it is now draws, for on-policy steps.

        Raises `ModelError` for a drafter that does not draft whole blocks, or one of shards.
        """
        if not isinstance(self.slot_pass, BlockPass):
            raise ModelError(
                "On-policy steps need a drafter of kind dspark or dflash, whole on every rank; "
                "leave --on-policy or --parallel fsdp2 out."
            )
        taps_TM = batch.taps_TM.to(self.slot_pass.dtype)
        if self._input_scale_M is not None:
            taps_TM = taps_TM * self._input_scale_M.to(taps_TM.dtype)
        return self.slot_pass.draft(batch, taps_TM, generator)

    def best_masters(self) -> dict[str, Tensor]:
        """The best weights so far, whole, float32, the input scale folded into the taps' weight."""
        masters: dict[str, Tensor] = dict(read_snapshot(self.folder / "best.pt")["masters"])
        assert self._input_scale_M is not None
        name = self.slot_pass.tap_weight
        if name is not None:
            masters[name] = masters[name] * self._input_scale_M.to(masters[name].device)
        return masters

    def _step(self, step: int) -> StepReport:
        started = time.monotonic()
        batches = self._batches.step(step)
        local = [self._objective.normaliser(batch) for batch in batches]
        sums = _Sums(self.slot_pass.sizes.block_size)
        sums.num_slots = sum(len(batch.rows_N) for batch in batches)
        (normaliser,) = self._summed([sum(local)])
        self._optimizer.zero_grad()
        for batch in batches:
            outcome = self._objective(
                batch,
                normaliser=normaliser,
                input_scale_M=self._input_scale_M,
                progress=self._share_done(step),
            )
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.accumulate()
            sums.add(outcome)
        sums.load(self._summed(sums.values()))
        factor = self._learning_rate_factor(step)
        norm = self._update(step, sums.loss, factor, batches)
        progress, wall_s = self._progress, time.monotonic() - started
        progress.step = step + 1
        progress.supervised_tokens += sums.num_slots
        progress.train_s += wall_s
        return StepReport(
            step=progress.step,
            num_steps=progress.num_steps or 0,
            loss=sums.loss,
            gradient_norm=norm,
            learning_rate_factor=factor,
            num_slots=sums.num_slots,
            accepted_K=tuple(sums.accepted_K.tolist()),
            slots_K=tuple(sums.slots_K.tolist()),
            wall_s=wall_s,
        )

    def _summed(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self._ranks.sum_all([total])
        summed: list[float] = total.tolist()
        return summed

    def _update(self, step: int, loss: float, factor: float, batches: Sequence[Batch]) -> float:
        """The optimiser's step; names step and tensor where a value is not finite."""
        advice = (
            f"the last checkpoint in {self.folder} is good, start from it with a lower learning "
            "rate."
        )
        if not math.isfinite(loss):
            cause = self._objective.first_bad(batches, input_scale_M=self._input_scale_M)
            raise NumericsError(f"The loss of step {step + 1} is {loss}: {cause}; {advice}")
        try:
            return self._optimizer.step(factor=factor)
        except NumericsError as error:
            raise NumericsError(f"Step {step + 1}: {error}; {advice}") from error

    def _share_done(self, step: int) -> float:
        return step / self._progress.num_steps if self._progress.num_steps else 0.0

    def _learning_rate_factor(self, step: int) -> float:
        num_steps = self._progress.num_steps
        if num_steps is None:  # calibrating: these steps are undone
            return 1.0
        return schedule(step, num_steps=num_steps, warmup=self.config.optimizer.warmup)

    def _measured_input_scale(self) -> Tensor:
        """1 / RMS of each tap channel over some steps' contexts, float32 [M].

        Channels differ by two orders of magnitude. Training sees scaled taps, so that Muon's
        equal steps mean the same for each; `best_masters` moves the scale into the weight. Taps
        that a norm reads first are left as they are.
        """
        if self.slot_pass.tap_weight is None:
            return torch.ones(())
        batches = [batch for step in range(_SCALE_STEPS) for batch in self._batches.step(step)]
        count = torch.tensor(float(sum(len(batch.taps_TM) for batch in batches)))
        squares_M = torch.stack([b.taps_TM.float().square().sum(dim=0) for b in batches]).sum(dim=0)
        self._ranks.sum_all([squares_M, count])
        scale_M = (squares_M / max(float(count), 1.0)).clamp(min=1e-6).rsqrt()
        return scale_M.to(self.slot_pass.dtype).float()

    def _start_from_drafter(self, input_scale_M: Tensor) -> None:
        """Take the scale out of the taps' weight; keep these weights unless training beats them."""
        if self.slot_pass.tap_weight is not None:
            self._optimizer.masters[self.slot_pass.tap_weight] /= input_scale_M
        self._optimizer.copy_to_parameters()
        self._validate()

    def _calibrated_num_steps(self) -> int:
        """Steps that fit into `minutes`, from the median time of a few steps that leave no trace.

        The first one pays for compilation and is not counted.
        """
        assert self.config.minutes is not None
        before = _cloned(self._optimizer.state_dict())
        times = [self._step(step).wall_s for step in range(_CALIBRATION_STEPS)]
        self._optimizer.load_state_dict(before)
        self._progress = _Progress(
            best_tau=self._progress.best_tau, best_step=self._progress.best_step
        )
        typical_s = self._ranks.largest(sorted(times[1:])[(len(times) - 1) // 2])
        return max(1, int(self.config.minutes * 60.0 / typical_s))

    def _validate(self) -> None:
        validation = validate(
            self._measure,
            self._batches.held_out(),
            input_scale_M=self._input_scale_M,
            ranks=self._ranks,
        )
        progress = self._progress
        tau = 0.0 if validation is None else validation.tau
        if validation is not None and self._on_validation is not None:
            self._on_validation(progress.step, validation)
        if validation is not None and tau <= progress.best_tau:
            return
        progress.best_tau, progress.best_step = tau, progress.step
        masters = self._optimizer.whole_masters()
        if self._ranks.rank == 0:
            best = {"step": progress.step, "tau": tau, "masters": masters}
            write_snapshot(self.folder / "best.pt", best)

    def _fingerprint(self) -> dict[str, str]:
        loop = dataclasses.asdict(self.config)
        for name in ("validate_every", "checkpoint_every", "parallel"):
            loop.pop(name)
        return {
            "drafter configuration": _as_text(dataclasses.asdict(self.slot_pass.sizes)),
            "training configuration": _as_text(loop),
            **self._batches.fingerprint(),
        }

    def _save(self) -> None:
        content = {
            "fingerprint": self._fingerprint(),
            "progress": dataclasses.asdict(self._progress),
            "input_scale_M": self._input_scale_M,
            "optimizer": self._optimizer.state_dict(),
        }
        if self._ranks.rank == 0:
            write_snapshot(self.folder / "training.pt", content)

    def _resume(self) -> bool:
        file = self.folder / "training.pt"
        self._ranks.wait()  # nobody writes it before all have looked
        if not file.exists():
            return False
        saved = read_snapshot(file)
        for key, value in self._fingerprint().items():
            if saved["fingerprint"].get(key) != value:
                raise ModelError(
                    f"{file} belongs to a run with another {key}; use another folder, or delete "
                    "it to start again."
                )
        self._progress = _Progress(**saved["progress"])
        self._input_scale_M = saved["input_scale_M"].to(self.slot_pass.head_weight_SD.device)
        self._optimizer.load_state_dict(saved["optimizer"])
        return True


class _Sums:
    """What the micro-batches of a step add up to."""

    def __init__(self, block_size: int) -> None:
        self.loss = 0.0
        self.num_slots = 0
        self.accepted_K = torch.zeros(block_size, dtype=torch.float64)
        self.slots_K = torch.zeros_like(self.accepted_K)

    def add(self, outcome: Outcome) -> None:
        """One batch's loss, and acceptance by slot where the target is known."""
        self.loss += float(outcome.loss.detach())
        if outcome.head.acceptance_N is not None:
            accepted_K, slots_K = outcome.acceptance_by_slot(len(self.slots_K))
            self.accepted_K += accepted_K
            self.slots_K += slots_K

    def values(self) -> list[float]:
        """All of it, to be summed over ranks."""
        return [self.loss, self.num_slots, *self.accepted_K.tolist(), *self.slots_K.tolist()]

    def load(self, values: Sequence[float]) -> None:
        """Put summed `values` back."""
        block_size = len(self.slots_K)
        self.loss, self.num_slots = values[0], round(values[1])
        self.accepted_K = torch.tensor(values[2 : 2 + block_size], dtype=torch.float64)
        self.slots_K = torch.tensor(values[2 + block_size :], dtype=torch.float64)


def compiled_kernel(weights: losses.LossWeights) -> losses.ChunkKernel:
    """The elementwise part of the loss compiled, or as it is where no compiler works."""
    plain = losses.kernel_for(weights)
    compiled: losses.ChunkKernel = torch.compile(plain, dynamic=True)
    ones_n = torch.ones(3)
    factors = losses.Factors(ones_n, ones_n, ones_n, ones_n, ones_n, eta=weights.hybrid_eta)
    try:
        compiled(torch.ones(3, 5), torch.ones(3, 5), ones_n, factors)
    except RuntimeError:
        return plain
    return compiled


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far; of the device's memory if there is a GPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _as_text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return value
