"""`dspark bench perplexity`: how well a target in one arithmetic predicts given answers.

The answers' own tokens count, the prompts do not. It runs the engine's own passes; it samples
nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch

from dspark.benchmarks.environment import Environment
from dspark.benchmarks.passes import Passes
from dspark.data.answers import Answer
from dspark.errors import InputError
from dspark.models.target import Target

_CHUNK = 128  # tokens of a pass: logits of a whole vocabulary for each


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """exp of the mean negative log-likelihood, in nats, of `num_tokens` answer tokens."""

    perplexity: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityReport:
    """By arithmetic, and each over every earlier one: {"int8/bf16": 1.004}."""

    arithmetics: Mapping[str, Perplexity]
    ratios: Mapping[str, float]
    answers: int
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """The keys of the `--json` line."""
        return asdict(self)


def measure(
    target: Target,
    answers: Sequence[Answer],
    *,
    on_answer: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of all answer tokens together; `on_answer(done, total)` hears of progress.

    Raises `InputError` if there is no token to predict.
    """
    counted = [answer for answer in answers if len(answer.token_ids) > 0]
    if not counted:
        raise InputError("The answers hold no token, so there is nothing to predict.")
    longest = max(len(a.prompt_token_ids) + len(a.token_ids) for a in counted)
    passes = Passes(target, num_requests=1, num_positions=longest)
    loss = 0.0
    for number, answer in enumerate(counted, start=1):
        loss += _negative_log_likelihood(passes, answer)
        if on_answer is not None:
            on_answer(number, len(counted))
    num_tokens = sum(len(answer.token_ids) for answer in counted)
    return Perplexity(perplexity=math.exp(loss / num_tokens), num_tokens=num_tokens)


def report_of(found: Mapping[str, Perplexity], *, num_answers: int) -> PerplexityReport:
    """Arithmetics put together, in their order."""
    return PerplexityReport(
        arithmetics=found,
        ratios={
            f"{later}/{earlier}": found[later].perplexity / found[earlier].perplexity
            for earlier, later in combinations(found, 2)
        },
        answers=num_answers,
        environment=Environment.here(),
    )


@torch.inference_mode()
def _negative_log_likelihood(passes: Passes, answer: Answer) -> float:
    ids_T, mask_T = answer.ids(), answer.loss_mask()
    loss = 0.0
    for start in range(0, len(ids_T) - 1, _CHUNK):
        chunk = ids_T[start : start + _CHUNK]
        logits_NV = passes.run([chunk.tolist()], start=start)
        next_N = ids_T[start + 1 : start + 1 + len(chunk)]
        log_probs_NV = logits_NV[: len(next_N)].cpu().double().log_softmax(-1)
        chosen_N = log_probs_NV.gather(-1, next_N[:, None])[:, 0]
        loss -= float(chosen_N[mask_T[start + 1 : start + 1 + len(chunk)]].sum())
    return loss
