"""Cycles over toys, and the slow reference that their answers must equal."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dspark.core import Request, RoundResult, SamplingParams
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.models.drafter import Drafter
from dspark.models.target import Target

PROMPTS = ([1, 5, 7, 9], [1, 3] * 20, [1, 8, 9, 10, 11], [1, 44, 45, 20, 21, 22, 30])


def make_cycle(target: Target, drafter: Any, **changes: Any) -> Cycle:
    values = {"num_positions": 1024, "page_size": 4, "max_requests": 4, "is_checked": True}
    return Cycle(target, drafter=drafter, config=CycleConfig(**{**values, **changes}))


def packed(drafter: Drafter) -> Drafter:
    """The same drafter as it is served on a CPU."""
    drafter.pack()
    return drafter


def run(
    cycle: Cycle, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[Any]
) -> list[list[int]]:
    """Answers of requests submitted together."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    answers: dict[str, list[int]] = {}
    for index, (prompt, options) in enumerate(zip(prompts, each, strict=True)):
        answers[str(index)] = []
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=options))
    while cycle.has_work:
        for item in cycle.step().rounds:
            answers[item.request_id].extend(item.token_ids)
    return list(answers.values())


def decode_slowly(
    target: Target, prompt: Sequence[int], num_tokens: int, *, stop: Sequence[int] = ()
) -> list[int]:
    """The slow reference: the whole sequence again for each greedy token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens and not (ids[len(prompt) :] and ids[-1] in stop):
        hidden = target.states([torch.tensor(ids)], tap_layers=()).hidden_ND
        ids.append(int(target.logits(hidden[-1:]).argmax()))
    return ids[len(prompt) :]


def rounds_of_one(
    cycle: Cycle, prompt: Sequence[int], params: SamplingParams, *, name: str = "one"
) -> list[RoundResult]:
    """The rounds of one request that runs alone."""
    cycle.submit(Request(id=name, prompt_ids=prompt, params=params))
    rounds: list[RoundResult] = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    return rounds


def seen(rounds: Sequence[RoundResult]) -> list[Any]:
    """What a round shows of its drafts: counts, tokens, confidences."""
    return [
        (list(item.token_ids), item.num_offered, item.num_accepted, item.confidence_logits)
        for item in rounds
    ]


def assert_same(found: Sequence[RoundResult], expected: Sequence[RoundResult]) -> None:
    """Same tokens and counts round by round; confidences, which see every hidden state, agree."""
    for (*left, left_logits), (*right, right_logits) in zip(
        seen(found), seen(expected), strict=True
    ):
        assert left == right
        if right_logits is None:
            assert left_logits is None
        else:
            assert left_logits == pytest.approx(right_logits, abs=2e-3)
