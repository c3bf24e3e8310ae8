"""`dspark calibrate`: what a drafter's confidences are worth, and the scaling that makes them hold.

Prompts are answered with whole blocks verified, so that no round is censored. Figures are of
prompts that a fit has not seen: each task is judged by the fit of all others, a task alone half by
half. What is kept is the fit of all. It writes no file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from dspark.completion import Job, Prompt
from dspark.core import Coupling, RoundResult, SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM

MIN_ROUNDS = 200
_NUM_DRAWS = 20
_MEANS = ("mean_ece_before", "mean_ece_after", "mean_ece_noise")
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
        SamplingParams(seed=self.seed)
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
class GroupChange:
    """Prompts that are judged by the fit of all others: a task, or a half of the only one."""

    name: str
    rounds: int
    mean_ece_before: float
    mean_ece_after: float
    mean_ece_noise: float


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
    mean_ece_noise: float
    """What perfect confidences would show on as many rounds: bins of few rounds err by chance."""
    groups: Sequence[GroupChange]
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
            **{key: first[key] for key in ("positions", *_MEANS)},
            "rounds": sum(found.rounds for found in self.classes),
            "classes": [asdict(found) for found in self.classes],
            "environment": asdict(self.environment),
        }


def calibrate(
    llm: LLM,
    tasks: Mapping[str, Sequence[Prompt]],
    *,
    config: CalibrationConfig,
    on_prompt: OnPrompt | None = None,
) -> CalibrationReport:
    """Fit and judge. Raises `InputError` for too few rounds."""
    groups = _groups(tasks)
    # every block whole, and drawn: copies are not the drafter's
    whole = llm.with_config(replace(llm.config, copies=False)).with_policy("fixed")
    reports, scalings = [], {}
    for temperature in config.temperatures:
        found = _collect(whole, groups, temperature, config, on_prompt)
        name = config.class_of(temperature)
        scalings[name] = fit(_joined(list(found.values())))
        reports.append(_report(name, temperature, found, scalings[name]))
    return CalibrationReport(
        calibration=Calibration(scalings=scalings), classes=reports, environment=Environment.here()
    )


def _groups(tasks: Mapping[str, Sequence[Prompt]]) -> dict[str, Sequence[Prompt]]:
    """Prompts that are judged together: tasks, or the halves of the only one."""
    filled = {name: prompts for name, prompts in tasks.items() if prompts}
    if len(filled) > 1:
        return filled
    prompts = [prompt for found in filled.values() for prompt in found]
    if len(prompts) < 2:
        raise InputError("Calibration needs two prompts at least: one half judges the other's fit.")
    return {"even": prompts[::2], "odd": prompts[1::2]}


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
    groups: Mapping[str, Sequence[Prompt]],
    temperature: float,
    config: CalibrationConfig,
    on_prompt: OnPrompt | None,
) -> dict[str, ConfidenceRounds]:
    """Rounds of each group."""
    every = [(name, prompt) for name, prompts in groups.items() for prompt in prompts]
    jobs = [
        Job(key=str(index), prompt=prompt, params=config.params(temperature, index))
        for index, (_, prompt) in enumerate(every)
    ]
    line = iter(jobs)
    results: dict[str, list[RoundResult]] = {name: [] for name in groups}
    for done, (job, completion) in enumerate(llm.drain(lambda: next(line, None))):
        # a round near the end of its answer drafts less than a block
        results[every[int(job.key)][0]] += [
            item for item in completion.rounds if item.num_planned == llm.block_size
        ]
        if on_prompt is not None:
            on_prompt(f"temperature {temperature:g}", done + 1, len(jobs))
    found = {name: ConfidenceRounds.of(rounds) for name, rounds in results.items()}
    rounds = {name: group for name, group in found.items() if group is not None}
    count = sum(len(group.logits_RK) for group in rounds.values())
    if len(rounds) < 2 or count < MIN_ROUNDS:
        raise InputError(
            f"{count} rounds at temperature {temperature:g} are too few to calibrate with, "
            f"{MIN_ROUNDS} is the least; give more prompts or longer answers."
        )
    return rounds


def _joined(parts: Sequence[ConfidenceRounds]) -> ConfidenceRounds:
    return ConfidenceRounds(
        logits_RK=torch.cat([part.logits_RK for part in parts]),
        verified_R=torch.cat([part.verified_R for part in parts]),
        accepted_R=torch.cat([part.accepted_R for part in parts]),
    )


def _report(
    name: SamplingClass,
    temperature: float,
    groups: Mapping[str, ConfidenceRounds],
    kept: Scaling,
) -> ClassReport:
    judged = {}
    for group, rounds in groups.items():
        others = [found for other, found in groups.items() if other != group]
        judged[group] = scaled(rounds, fit(_joined(others)))
    before, after = _joined(list(groups.values())), _joined(list(judged.values()))
    old, new = calibration_by_position(before), calibration_by_position(after)
    return ClassReport(
        sampling_class=name.value,
        temperature=temperature,
        rounds=len(before.logits_RK),
        scales=kept.scales,
        biases=kept.biases,
        mean_ece_before=mean_ece(old) or 0.0,
        mean_ece_after=mean_ece(new) or 0.0,
        mean_ece_noise=noise_of_ece(after),
        groups=[
            GroupChange(
                name=group,
                rounds=len(rounds.logits_RK),
                mean_ece_before=_error(rounds),
                mean_ece_after=_error(judged[group]),
                mean_ece_noise=noise_of_ece(judged[group]),
            )
            for group, rounds in groups.items()
        ],
        positions=[
            _change(a, b, before=before, after=after) for a, b in zip(old, new, strict=True)
        ],
    )


def noise_of_ece(rounds: ConfidenceRounds) -> float:
    """Mean ECE that these confidences would show if they were the truth, by drawn outcomes."""
    generator = torch.Generator().manual_seed(0)
    chances_RK = rounds.logits_RK.sigmoid()
    errors = []
    for _ in range(_NUM_DRAWS):
        is_kept_RK = torch.rand(chances_RK.shape, generator=generator) < chances_RK
        drawn = ConfidenceRounds(
            logits_RK=rounds.logits_RK,
            verified_R=rounds.verified_R,
            accepted_R=is_kept_RK.long().cumprod(1).sum(1),
        )
        errors.append(_error(drawn))
    return sum(errors) / len(errors)


def _error(rounds: ConfidenceRounds) -> float:
    return mean_ece(calibration_by_position(rounds)) or 0.0


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
