"""The greedy tests: token for token beside plain decoding, and each token the likeliest stated.

The noise that may explain a difference is measured on the very answers. Of plain decoding alone
and plain decoding in a crowd, the largest change of a gap between two tokens; of speculative
answers beside plain ones only a multiple of the median, so that a fault which shifts some
positions cannot excuse itself.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from dspark.benchmarks.server_audit.asking import (
    Answer,
    Chat,
    Question,
    Side,
    ask_all,
    sum_told,
)
from dspark.benchmarks.server_audit.config import AuditConfig, Profile
from dspark.benchmarks.server_audit.outcome import Divergence, Outcome

_MEDIANS = 10.0  # the largest of some thousand roundings against their median


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyFindings:
    """What one profile gave."""

    outcomes: Sequence[Outcome]
    divergences: Sequence[Divergence]
    noise: float
    num_drafted: int | None


def greedy_tests(
    profile: Profile,
    *,
    side: Side,
    reference: Side | None,
    chats: Sequence[Chat],
    config: AuditConfig,
) -> GreedyFindings:
    """Both tests, or the second alone without a reference (and neither where nothing is stated)."""
    alone = reference or side
    questions = [
        Question(
            chat=chat,
            max_tokens=config.greedy_tokens,
            temperature=0.0,
            fields=profile.fields,
        )
        for chat in chats
    ]
    plain = ask_all([(alone, q) for q in questions], concurrency=1)
    crowd = ask_all([(alone, q) for q in questions], concurrency=config.concurrency)
    answers = crowd
    if reference is not None:
        answers = ask_all([(side, q) for q in questions], concurrency=config.concurrency)
    noise = _noise(plain, crowd, answers, config)
    outcomes, divergences = [], []
    if reference is not None:
        divergences = list(_divergences(profile, plain, answers, noise))
        unexplained = sum(not d.explained for d in divergences)
        outcomes.append(
            Outcome(
                name=f"T=0 {profile.name}: tokens of plain decoding",
                statistic=unexplained,
                p_value=None,
                passed=unexplained == 0,
                detail=f"{len(divergences)} of {len(chats)} answers differ, {unexplained} "
                f"unexplained; noise {noise:.4f}",
            )
        )
    if profile.is_stated:
        outcomes.append(_likeliest(profile, answers, noise))
    return GreedyFindings(
        outcomes=outcomes,
        divergences=divergences,
        noise=noise,
        num_drafted=sum_told(answer.num_drafted for answer in answers),
    )


def first_difference(left: Answer, right: Answer) -> int | None:
    """Index of the first token that differs; `None` if both say the same."""
    for index, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if a != b:
            return index
    if len(left.tokens) == len(right.tokens):
        return None
    return min(len(left.tokens), len(right.tokens))


def _noise(
    plain: Sequence[Answer], crowd: Sequence[Answer], answers: Sequence[Answer], config: AuditConfig
) -> float:
    shapes = [x for pair in zip(plain, crowd, strict=True) for x in _gap_changes(*pair)]
    drafted = [x for pair in zip(plain, answers, strict=True) for x in _gap_changes(*pair)]
    most = max(max(shapes, default=0.0), _MEDIANS * (median(drafted) if drafted else 0.0))
    return min(most, config.max_noise)


def _gap_changes(left: Answer, right: Answer) -> Iterator[float]:
    """How the gap of the two likeliest tokens moves, wherever both answers stand alike."""
    end = first_difference(left, right)
    for one, other in islice(zip(left.tops, right.tops, strict=False), end):
        best = sorted(one, key=lambda token: -one[token])[:2]
        if len(best) == 2 and all(token in other for token in best):
            change = (one[best[0]] - one[best[1]]) - (other[best[0]] - other[best[1]])
            if math.isfinite(change):
                yield abs(change)


def _divergences(
    profile: Profile, plain: Sequence[Answer], answers: Sequence[Answer], noise: float
) -> Iterator[Divergence]:
    for number, (one, other) in enumerate(zip(plain, answers, strict=True)):
        position = first_difference(one, other)
        if position is None:
            continue
        tokens = [a.tokens[position] if position < len(a.tokens) else None for a in (one, other)]
        gap = _gap(one, other, position)
        yield Divergence(
            prompt=number,
            position=position,
            top2_gap=gap,
            noise=noise,
            explained=gap is not None and gap <= noise,
            profile=profile.name,
            tokens=tokens,
        )


def _gap(plain: Answer, other: Answer, position: int) -> float | None:
    """How much likelier plain decoding's token is than the other one, by its own statement.

    A token that is not listed is at least as far as the last listed one. Where one answer ends,
    its end token is not told: the runner-up of the one that goes on is the nearest it can be.
    """
    if position >= len(plain.tokens):
        plain, other = other, plain
    top, chosen = plain.tops[position], plain.logprobs[position]
    rivals = {token: value for token, value in top.items() if token != plain.tokens[position]}
    if not rivals:
        return None
    if position >= len(other.tokens):
        return chosen - max(rivals.values())
    return chosen - rivals.get(other.tokens[position], min(rivals.values()))


def _likeliest(profile: Profile, answers: Sequence[Answer], noise: float) -> Outcome:
    gaps = [
        max(top.values()) - chosen
        for answer in answers
        for top, chosen in zip(answer.tops, answer.logprobs, strict=True)
        if top
    ]
    worst, wrong = max(gaps, default=0.0), sum(gap > noise for gap in gaps)
    return Outcome(
        name=f"T=0 {profile.name}: likeliest tokens as stated",
        statistic=worst,
        p_value=None,
        passed=wrong == 0,
        detail=f"{wrong} of {len(gaps)} tokens are less likely than the best by more than "
        f"{noise:.4f}; the worst by {worst:.4f}",
    )
