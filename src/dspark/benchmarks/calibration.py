"""`dspark calibrate`: what a drafter's confidences are worth, and the scaling that makes them hold.

Prompts are answered with whole blocks verified, so that no round is censored. Figures are of
prompts that a fit has not seen: each half of them is judged by the fit of the other half. What is
kept is the fit of all. It writes no file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dspark.algorithms.calibration import Calibration, SamplingClass, Scaling
from dspark.algorithms.calibration_metrics import (
    ConfidenceRounds,
    PositionCalibration,
    ReliabilityBin,
    calibration_by_position,
    mean_ece,
    reliability,
)
from dspark.algorithms.online_calibration import MAX_SHARE, Window, refit
from dspark.benchmarks.environment import Environment
from dspark.core import Coupling, RoundResult, SamplingParams
from dspark.errors import InputError, ModelError
from dspark.llm import LLM, Job, Prompt

MIN_ROUNDS = 200
OnPrompt = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """How the prompts are answered."""

    temperatures: Sequence[float] = (0.0, 0.6, 1.0)
    """One for each class of requests: greedy, below 0.75, and above."""
    max_new_tokens: int = 128
    """Tokens of each answer, at most."""
    seed: int = 0
    """Seed of the first prompt; the next has the next."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, but it must be at least 2.")
        classes = [self.class_of(t) for t in self.temperatures]
        if not classes or len(set(classes)) < len(classes):
            raise InputError(
                f"temperatures are {list(self.temperatures)}, but there must be at most one of 0, "
                "one below 0.75 and one above."
            )

    @staticmethod
    def class_of(temperature: float) -> SamplingClass:
        """The class of requests that a temperature stands for."""
        return SamplingClass.of(SamplingParams(temperature=temperature))

    def params(self, temperature: float, index: int) -> SamplingParams:
        """How a prompt is answered; acceptance is that of maximal coupling."""
        return SamplingParams(
            temperature=temperature,
            max_tokens=self.max_new_tokens,
            seed=self.seed + index,
            coupling=Coupling.MAXIMAL,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionChange:
    """One position of a block, before and after."""

    k: int
    count: int
    ece_before: float
    ece_after: float
    ece_mass_before: float
    ece_mass_after: float
    auroc: float | None
    """Of the calibrated survival."""
    brier_before: float
    brier_after: float
    bins_before: Sequence[ReliabilityBin]
    bins_after: Sequence[ReliabilityBin]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """One class of requests."""

    sampling_class: str
    temperature: float
    rounds: int
    scales: Sequence[float]
    biases: Sequence[float]
    mean_ece_before: float
    mean_ece_after: float
    positions: Sequence[PositionChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """All classes; the scalings are in `calibration`."""

    calibration: Calibration
    classes: Sequence[ClassReport]
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line: those of the first class, then all classes."""
        first = asdict(self.classes[0])
        return {
            **{key: first[key] for key in ("positions", "mean_ece_before", "mean_ece_after")},
            "rounds": sum(found.rounds for found in self.classes),
            "classes": [asdict(found) for found in self.classes],
            "environment": asdict(self.environment),
        }


def calibrate(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    config: CalibrationConfig,
    on_prompt: OnPrompt | None = None,
) -> CalibrationReport:
    """Fit and judge. Raises `ModelError` for a drafter that says nothing of its confidence."""
    if len(prompts) < 2:
        raise InputError("Calibration needs two prompts at least: one half judges the other's fit.")
    whole = llm.with_policy("fixed")
    reports, scalings = [], {}
    for temperature in config.temperatures:
        halves = _collect(whole, prompts, temperature, config, on_prompt)
        name = config.class_of(temperature)
        scalings[name] = fit(_joined(halves))
        reports.append(_report(name, temperature, halves, scalings[name]))
    return CalibrationReport(
        calibration=Calibration(scalings=scalings), classes=reports, environment=Environment.here()
    )


def fit(rounds: ConfidenceRounds) -> Scaling:
    """Scale and bias of every position, over rounds that were verified in full."""
    count, size = rounds.logits_RK.shape
    window = Window.empty(size, share=MAX_SHARE, size=count).extended(
        rounds.logits_RK.numpy(),
        planned=np.full(count, size),
        verified=rounds.verified_R.numpy(),
        accepted=rounds.accepted_R.numpy(),
    )
    return refit(window, Scaling.identity(size))


def scaled(rounds: ConfidenceRounds, scaling: Scaling) -> ConfidenceRounds:
    """The same rounds with the logits of calibrated confidences."""
    scale_K, bias_K = torch.tensor(scaling.scales), torch.tensor(scaling.biases)
    return ConfidenceRounds(
        logits_RK=rounds.logits_RK * scale_K + bias_K,
        verified_R=rounds.verified_R,
        accepted_R=rounds.accepted_R,
    )


def _collect(
    llm: LLM,
    prompts: Sequence[Prompt],
    temperature: float,
    config: CalibrationConfig,
    on_prompt: OnPrompt | None,
) -> list[ConfidenceRounds]:
    """Rounds of the prompts with even and with odd numbers."""
    jobs = [
        Job(key=str(index), prompt=prompt, params=config.params(temperature, index))
        for index, prompt in enumerate(prompts)
    ]
    line = iter(jobs)
    halves: list[list[RoundResult]] = [[], []]
    for done, (job, completion) in enumerate(llm.drain(lambda: next(line, None))):
        # a round near the end of its answer drafts less than a block
        halves[int(job.key) % 2] += [
            item for item in completion.rounds if item.num_planned == llm.block_size
        ]
        if on_prompt is not None:
            on_prompt(f"temperature {temperature:g}", done + 1, len(jobs))
    found = [ConfidenceRounds.of(half) for half in halves]
    rounds = [half for half in found if half is not None]
    if not rounds:
        raise ModelError(
            "This drafter says nothing of its confidence, so there is nothing to calibrate; in "
            "service the chances of its positions are learnt from outcomes."
        )
    count = sum(len(half.logits_RK) for half in rounds)
    if len(rounds) < 2 or count < MIN_ROUNDS:
        raise InputError(
            f"{count} rounds at temperature {temperature:g} are too few to calibrate with, "
            f"{MIN_ROUNDS} is the least; give more prompts or longer answers."
        )
    return rounds


def _joined(halves: Sequence[ConfidenceRounds]) -> ConfidenceRounds:
    return ConfidenceRounds(
        logits_RK=torch.cat([half.logits_RK for half in halves]),
        verified_R=torch.cat([half.verified_R for half in halves]),
        accepted_R=torch.cat([half.accepted_R for half in halves]),
    )


def _report(
    name: SamplingClass, temperature: float, halves: Sequence[ConfidenceRounds], kept: Scaling
) -> ClassReport:
    before = _joined(halves)
    after = _joined([scaled(halves[0], fit(halves[1])), scaled(halves[1], fit(halves[0]))])
    old, new = calibration_by_position(before), calibration_by_position(after)
    return ClassReport(
        sampling_class=name.value,
        temperature=temperature,
        rounds=len(before.logits_RK),
        scales=kept.scales,
        biases=kept.biases,
        mean_ece_before=mean_ece(old) or 0.0,
        mean_ece_after=mean_ece(new) or 0.0,
        positions=[
            _change(a, b, before=before, after=after) for a, b in zip(old, new, strict=True)
        ],
    )


def _change(
    old: PositionCalibration,
    new: PositionCalibration,
    *,
    before: ConfidenceRounds,
    after: ConfidenceRounds,
) -> PositionChange:
    return PositionChange(
        k=old.k,
        count=old.count,
        ece_before=old.ece,
        ece_after=new.ece,
        ece_mass_before=old.ece_mass,
        ece_mass_after=new.ece_mass,
        auroc=new.auroc,
        brier_before=old.brier,
        brier_after=new.brier,
        bins_before=reliability(*before.survival_at(old.k)),
        bins_after=reliability(*after.survival_at(old.k)),
    )


def table_rows(report: CalibrationReport) -> list[Mapping[str, str]]:
    """The table for people, one row a position."""
    return [
        {
            "temperature": f"{found.temperature:g}",
            "position": str(position.k),
            "rounds": str(position.count),
            "ECE before": f"{position.ece_before:.3f}",
            "after": f"{position.ece_after:.3f}",
            "equal mass": f"{position.ece_mass_after:.3f}",
            "AUROC": "" if position.auroc is None else f"{position.auroc:.3f}",
            "Brier": f"{position.brier_after:.3f}",
        }
        for found in report.classes
        for position in found.positions
    ]
