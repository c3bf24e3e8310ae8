"""`dspark bench train`: one training step here against DeepSpec's, on the same blocks.

Each runs in a process of its own, so that its peak memory is its own. Speed, memory and the
difference of the two losses are measured; the same drafter, states and anchors go into both.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.algorithms import anchors
from dspark.benchmarks.deepspec_step import Sample, sample_loss
from dspark.core import resolve_dtype
from dspark.data.answers import Answer
from dspark.data.batches import pack
from dspark.data.hidden_states import OnlineStates, States
from dspark.errors import InputError
from dspark.machine import num_processors
from dspark.models.drafter import Drafter
from dspark.models.drafter_config import DrafterConfig, default_target_layer_ids
from dspark.models.embedded import DEFAULT_TARGET
from dspark.models.target import Target
from dspark.training.kinds import slot_pass_of
from dspark.training.objective import Objective, ObjectiveConfig, TargetHead
from dspark.training.optimizer import Optimizer, OptimizerConfig
from dspark.training.trainer import compiled_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBenchConfig:
    """What is trained on; the texts are random tokens, whose states cost what any text's do."""

    target: str = DEFAULT_TARGET
    """Target whose states and LM head are used."""
    dtype: str = "bf16"
    """Arithmetic of the measured steps; the losses are compared in float32 as well."""
    num_samples: int = 4
    """Sequences in a step."""
    prompt_tokens: int = 90
    """Of each sequence."""
    answer_tokens: int = 170
    """Of each sequence; each but the last is an anchor."""
    num_layers: int = 2
    """Layers of the drafter."""
    block_size: int = 7
    """Tokens of a block."""
    rank: int = 256
    """Of the sequential head."""
    num_anchors: int = 512
    """Blocks that DeepSpec pads each sample to."""
    repeats: int = 3
    """Measured steps after one that is not."""
    threads: int | None = None
    """Processor threads."""
    is_compiled: bool = True
    """Compile the elementwise part of our loss."""

    def __post_init__(self) -> None:
        for name in (
            "num_samples",
            "prompt_tokens",
            "num_layers",
            "block_size",
            "rank",
            "num_anchors",
            "repeats",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if self.answer_tokens < 2:
            raise InputError(f"answer_tokens is {self.answer_tokens}, but it must be at least 2.")
        if self.threads is not None and not 1 <= self.threads <= num_processors():
            raise InputError(
                f"threads is {self.threads}, but it must lie in 1..{num_processors()}, the "
                "processors that this process may use."
            )
        if self.answer_tokens - 1 > self.num_anchors:
            raise InputError(
                f"answer_tokens is {self.answer_tokens}, but only {self.num_anchors} anchors are "
                "drawn; take shorter answers, so that both steps have the same blocks."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One way to do the step."""

    tokens_per_s: float
    """Supervised tokens."""
    step_s: float
    """Median."""
    peak_memory_bytes: int
    """Of the whole process."""
    step_memory_bytes: int
    """What the step added to the process's size before it."""
    loss: float
    loss_fp32: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBenchReport:
    """Both, and how they compare."""

    config: TrainBenchConfig
    supervised_tokens: int
    ours: StepFigures
    deepspec: StepFigures

    def to_json(self) -> dict[str, Any]:
        """Figures, ratios and the losses' difference."""
        ours, theirs = self.ours, self.deepspec
        return {
            **asdict(self),
            "speed_ratio": ours.tokens_per_s / theirs.tokens_per_s,
            "memory_ratio": ours.peak_memory_bytes / theirs.peak_memory_bytes,
            "step_memory_ratio": ours.step_memory_bytes / theirs.step_memory_bytes,
            "loss_difference": abs(ours.loss - theirs.loss),
            "loss_difference_fp32": abs(ours.loss_fp32 - theirs.loss_fp32),
        }


def compare(config: TrainBenchConfig) -> TrainBenchReport:
    """Run both steps, one process after the other."""
    results = {name: _in_own_process(name, config) for name in ("ours", "deepspec")}
    return TrainBenchReport(
        config=config,
        supervised_tokens=results["ours"].pop("supervised_tokens"),
        ours=StepFigures(**results["ours"]),
        deepspec=StepFigures(**_without_count(results["deepspec"])),
    )


def measure(name: str, config: TrainBenchConfig) -> dict[str, Any]:
    """The figures of one way, in this process."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    case = _Case(config, resolve_dtype(config.dtype))
    step = case.ours if name == "ours" else case.deepspec
    before = _peak_bytes()
    losses, times = [], []
    for _ in range(1 + config.repeats):
        started = time.monotonic()
        losses.append(step())
        times.append(time.monotonic() - started)
    peak = _peak_bytes()
    step_s = sorted(times[1:])[config.repeats // 2]
    exact = _Case(config, torch.float32, small=True)
    return {
        "supervised_tokens": case.num_slots,
        "tokens_per_s": case.num_slots / step_s,
        "step_s": step_s,
        "peak_memory_bytes": peak,
        "step_memory_bytes": max(peak - before, 1),
        "loss": losses[0],
        "loss_fp32": (exact.ours if name == "ours" else exact.deepspec)(),
    }


class _Case:
    """A drafter, states of some sequences, and the two ways to take a step on them."""

    def __init__(
        self, config: TrainBenchConfig, dtype: torch.dtype, *, small: bool = False
    ) -> None:
        self.config = config
        target = Target.load(config.target, dtype=dtype, packed=False)
        self.answers = _answers(config, target.spec.vocab_size, 1 if small else config.num_samples)
        self.drafter = _drafter(config, target).to(dtype)
        online = OnlineStates(target, tap_layers=self.drafter.config.target_layer_ids)
        self.states = [online.read([answer])[0] for answer in self.answers]
        self.anchors = [anchors.candidates(answer.loss_mask()) for answer in self.answers]
        # twice the masters of the other way would count as this way's memory
        self._optimizer: Optimizer | None = None
        self._adam: _Adam | None = None
        drawn = [
            anchors.blocks(a.ids(), a.loss_mask(), at, block_size=config.block_size)
            for a, at in zip(self.answers, self.anchors, strict=True)
        ]
        self._batch = pack(list(zip(drawn, self.states, strict=True)), block_size=config.block_size)
        self.num_slots = len(self._batch.rows_N)
        objective = ObjectiveConfig()
        self._objective = Objective(
            slot_pass_of(self.drafter),
            config=objective,
            target_head=TargetHead(scale=target.head_scale, softcap=target.softcap),
            kernel=compiled_kernel(objective.weights) if config.is_compiled and not small else None,
        )
        self._normaliser = self._objective.normaliser(self._batch)

    def ours(self) -> float:
        """The trainer's step, with its optimiser."""
        if self._optimizer is None:
            self._optimizer = Optimizer(self.drafter, config=OptimizerConfig())
        self._optimizer.zero_grad()
        outcome = self._objective(self._batch, normaliser=self._normaliser, input_scale_M=None)
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(factor=0.0)
        return float(outcome.loss.detach())

    def deepspec(self) -> float:
        """DeepSpec's: sample after sample, then AdamW on float32 masters."""
        if self._adam is None:
            self._adam = _Adam(list(self.drafter.parameters()))
        loss = 0.0
        for answer, states, at in zip(self.answers, self.states, self.anchors, strict=True):
            part = sample_loss(
                self.drafter,
                _sample(answer, states, at),
                normaliser=self._normaliser,
                num_anchors=self.config.num_anchors,
            )
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        self._adam.step()
        return loss


class _Adam:
    """AdamW on float32 copies, rounded back; learning rate 0, so that each step is the same."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._masters = [p.detach().float().clone().requires_grad_() for p in parameters]
        self._rule = torch.optim.AdamW(self._masters, lr=0.0, weight_decay=0.0)

    def step(self) -> None:
        """One update from `.grad`."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self._rule.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)


def _sample(answer: Answer, states: States, anchors_R: Tensor) -> Sample:
    return Sample(
        ids_T=answer.ids(),
        loss_mask_T=answer.loss_mask(),
        taps_TM=states.taps_NM,
        last_TD=states.last_ND,
        anchors_R=anchors_R,
    )


def _answers(config: TrainBenchConfig, vocab_size: int, count: int) -> list[Answer]:
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        ids: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        return ids

    return [
        Answer(
            id=str(number),
            domain="random",
            temperature=1.0,
            top_p=1.0,
            prompt_token_ids=draw(config.prompt_tokens),
            token_ids=draw(config.answer_tokens),
            finish_reason="length",
            text="",
        )
        for number in range(count)
    ]


def _drafter(config: TrainBenchConfig, target: Target) -> Drafter:
    text = target.text_config
    heads = text["num_attention_heads"]
    return Drafter(
        DrafterConfig(
            vocab_size=target.spec.vocab_size,
            hidden_size=target.spec.hidden_size,
            intermediate_size=text["intermediate_size"],
            num_hidden_layers=config.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or target.spec.hidden_size // heads,
            max_position_embeddings=target.spec.max_positions,
            rope_theta=10000.0,
            num_target_layers=target.spec.num_layers,
            target_layer_ids=default_target_layer_ids(target.spec.num_layers),
            block_size=config.block_size,
            mask_token_id=0,
            markov_rank=config.rank,
        ),
        embed_weight_VD=target.embed_weight_VD,
        head_weight_VD=target.head_weight_VD,
        generator=torch.Generator().manual_seed(0),
    )


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _without_count(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "supervised_tokens"}


def _in_own_process(name: str, config: TrainBenchConfig) -> dict[str, Any]:
    command = [sys.executable, "-m", "dspark.benchmarks.training", name, json.dumps(asdict(config))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise InputError(f"The measurement of {name} failed ({last[0]}); nothing is reported.")
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return values


if __name__ == "__main__":
    run: Callable[..., dict[str, Any]] = measure
    print(json.dumps(run(sys.argv[1], TrainBenchConfig(**json.loads(sys.argv[2])))))
