"""Runs the target once over all answers and keeps what training needs on disk.

Resumable at any kill: each answer is there exactly once. Letters: legend in core.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.data.answers import Answer
from dspark.data.hidden_states import OnlineStates, States, passes
from dspark.data.states_cache import (
    CacheFormat,
    StatesCache,
    StatesWriter,
    require_limit,
    require_space,
)
from dspark.data.token_mass import sum_mass
from dspark.models.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """What a fill is about to do, told before the first byte."""

    predicted_bytes: int
    """Of the whole cache when it is full."""
    num_cached: int
    """Answers that are there already."""
    num_damaged: int
    """Answers whose rows were damaged and are computed again."""
    num_missing: int
    """Answers to be computed, the damaged ones among them."""


def fill_cache(
    target: Target,
    answers: Sequence[Answer],
    path: str | Path,
    *,
    format: CacheFormat,
    limit_gb: float | None = None,
    tokens_per_pass: int = 2560,
    passes_per_flush: int = 8,
    on_start: Callable[[Filling], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> StatesCache:
    """A cache that holds the states of all `answers`, computing what is missing or damaged.

    Raises `CapacityError` before the first pass if the disk, or `limit_gb`, cannot hold it.
    `on_answer(done, total)` reports progress.
    """
    predicted = format.predicted_bytes(num_tokens=_count(answers), num_answers=len(answers))
    require_limit(predicted, limit_gb=limit_gb)
    writer = StatesWriter(path, format=format)
    try:
        damaged = StatesCache(path).damaged()
        writer.drop(damaged)
        todo = [answer for answer in answers if not writer.holds(answer)]
        more = format.predicted_bytes(num_tokens=_count(todo), num_answers=len(todo))
        require_space(writer.path, num_bytes=more)
        if on_start is not None:
            filling = Filling(
                predicted_bytes=predicted,
                num_cached=len(answers) - len(todo),
                num_damaged=len(damaged),
                num_missing=len(todo),
            )
            on_start(filling)
        num_done = len(answers) - len(todo)
        for number, part in enumerate(passes(todo, tokens_per_pass), start=1):
            _compute(target, part, writer)
            if number % passes_per_flush == 0:
                writer.flush()
            num_done += len(part)
            if on_answer is not None:
                on_answer(num_done, len(answers))
        writer.flush()
    finally:
        writer.release()
    return StatesCache(path)


def _compute(target: Target, answers: Sequence[Answer], writer: StatesWriter) -> None:
    read = OnlineStates(target, tap_layers=writer.format.tap_layers).read(answers)
    writer.fit_channels(torch.cat([torch.cat((s.taps_NM, s.last_ND), dim=1) for s in read]))
    for answer, states in zip(answers, read, strict=True):
        mask_N = answer.loss_mask()
        lse_N = torch.full((len(mask_N),), float("nan"))
        own_ND = states.last_ND[mask_N.to(states.last_ND.device)]
        lse_N[mask_N] = sum_mass(target, own_ND, mass_V=writer.mass_V).cpu()
        kept = States(taps_NM=states.taps_NM, last_ND=states.last_ND, lse_N=lse_N)
        writer.append(answer, kept)


def _count(answers: Sequence[Answer]) -> int:
    return sum(len(answer.prompt_token_ids) + len(answer.token_ids) for answer in answers)
