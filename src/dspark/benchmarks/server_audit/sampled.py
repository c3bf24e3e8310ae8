"""The sampled tests: answers beside plain ones, and tokens beside the chances stated for them."""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dspark.algorithms.token_tests import (
    Context,
    Finding,
    SamplePair,
    goodness_of_fit,
    place,
    two_sample,
    uniformity,
)
from dspark.benchmarks.server_audit.asking import (
    Answer,
    Chat,
    OnAnswer,
    Question,
    Side,
    ask_all,
)
from dspark.benchmarks.server_audit.config import AuditConfig, Profile

_TIE = 1e-4  # log-probabilities that a JSON text may have rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledFinding:
    """One test, before all tests are judged together."""

    name: str
    finding: Finding
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Answers to each prompt of one profile; `plain` is empty without a reference."""

    profile: Profile
    answers: Sequence[Sequence[Answer]]
    plain: Sequence[Sequence[Answer]]


def draw_samples(
    profile: Profile,
    *,
    side: Side,
    reference: Side | None,
    chats: Sequence[Chat],
    config: AuditConfig,
    on_answer: OnAnswer,
) -> Samples:
    """Asks both sides in turn, so that they meet the same minutes and the same crowd."""
    sides = [side] if reference is None else [side, reference]
    questions = [
        (each, _question(profile, chat, config, number=number * len(sides) + place))
        for chat in chats
        for number in range(config.samples)
        for place, each in enumerate(sides)
    ]
    found = ask_all(questions, concurrency=config.concurrency, on_answer=on_answer)
    by_side = [found[place :: len(sides)] for place in range(len(sides))]
    grouped = [
        [some[start : start + config.samples] for start in range(0, len(some), config.samples)]
        for some in by_side
    ]
    return Samples(
        profile=profile, answers=grouped[0], plain=grouped[1] if len(grouped) > 1 else []
    )


def sampled_tests(samples: Samples, *, config: AuditConfig) -> Iterator[SampledFinding]:
    """The tests that these samples allow."""
    name = f"T={config.temperature:g} {samples.profile.name}"
    if samples.plain:
        pairs = [
            SamplePair(left=_tokens(left), right=_tokens(right))
            for left, right in zip(samples.answers, samples.plain, strict=True)
        ]
        found = two_sample(
            pairs,
            num_tokens=config.tokens,
            seed=config.seed,
            permutations=config.permutations,
        )
        yield SampledFinding(
            name=f"{name}: distribution of plain decoding",
            finding=found,
            detail=f"{len(pairs)} prompts, {config.samples} answers a side, first "
            f"{config.tokens} tokens, {found.num_cells} cells",
        )
    if is_stated(samples.profile, config):
        contexts = _contexts(samples.answers, samples.profile.top_k)
        found = goodness_of_fit(contexts)
        impossible = sum(context.num_impossible for context in contexts)
        yield SampledFinding(
            name=f"{name}: chances as stated",
            finding=found,
            detail=f"{found.num_cells} cells of {len(contexts)} prefixes"
            + (f", {impossible} tokens outside the filter" if impossible else ""),
        )

        places = list(_places(samples, random.Random(config.seed)))
        yield SampledFinding(
            name=f"{name}: places as stated",
            finding=uniformity(places),
            detail=f"{len(places)} tokens by their place among the stated chances",
        )


def _places(samples: Samples, chance: random.Random) -> Iterator[float]:
    top_k = samples.profile.top_k
    for answer in (answer for some in samples.answers for answer in some):
        for token, logprob, top in zip(answer.tokens, answer.logprobs, answer.tops, strict=True):
            yield place(token, _chances(token, logprob, top, top_k), chance.random())


def is_stated(profile: Profile, config: AuditConfig) -> bool:
    """Whether log-probabilities tell a token's chance, reported before processing or after."""
    enough = profile.top_k is None or profile.top_k <= config.top_logprobs
    return profile.is_stated and config.temperature == 1.0 and enough


def _question(profile: Profile, chat: Chat, config: AuditConfig, *, number: int) -> Question:
    return Question(
        chat=chat,
        max_tokens=config.tokens,
        temperature=config.temperature,
        fields=profile.fields,
        seed=config.seed + number if config.seeded else None,
    )


def _tokens(answers: Sequence[Answer]) -> list[Sequence[str]]:
    return [answer.tokens for answer in answers]


def _contexts(answers: Sequence[Sequence[Answer]], top_k: int | None) -> list[Context]:
    """What followed each prefix of each prompt. A prefix behind which an answer ended is left out:
    the end's own chance is not told."""
    counts: dict[tuple[int, tuple[str, ...]], Counter[Hashable]] = defaultdict(Counter)
    sums: dict[tuple[int, tuple[str, ...]], Counter[Hashable]] = defaultdict(Counter)
    ended = set()
    for prompt, some in enumerate(answers):
        for answer in some:
            for position, (token, top) in enumerate(zip(answer.tokens, answer.tops, strict=True)):
                key = (prompt, tuple(answer.tokens[:position]))
                counts[key][token] += 1
                sums[key].update(_chances(token, answer.logprobs[position], top, top_k))
            if answer.has_ended:
                ended.add((prompt, tuple(answer.tokens)))
    return [
        Context(
            counts=found,
            probs={token: mass / found.total() for token, mass in sums[key].items()},
            is_complete=top_k is not None,
        )
        for key, found in counts.items()
        if key not in ended
    ]


def _chances(
    token: str, logprob: float, top: Mapping[str, float], top_k: int | None
) -> Mapping[Hashable, float]:
    """Stated probabilities of one position, under the filter where there is one.

    A token that is not listed gets no cell of its own: that would let the draw choose its cell.
    """
    if top_k is None:
        return {other: math.exp(value) for other, value in top.items()}
    known = {**top, token: logprob}
    least = sorted(known.values(), reverse=True)[:top_k][-1] - _TIE
    kept = {other: math.exp(value) for other, value in known.items() if value >= least}
    mass = sum(kept.values())
    return {other: value / mass for other, value in kept.items()}
