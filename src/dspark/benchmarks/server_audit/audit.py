"""One audit: finds out what can be compared, asks, and judges all tests together."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from dspark.algorithms.token_tests import holm
from dspark.benchmarks.server_audit.asking import (
    Answer,
    Chat,
    OnAnswer,
    Side,
    is_refused,
    sum_told,
)
from dspark.benchmarks.server_audit.config import (
    GREEDY_PROFILES,
    OFF,
    SAMPLED_PROFILES,
    AuditConfig,
    Profile,
)
from dspark.benchmarks.server_audit.greedy import GreedyFindings, greedy_tests
from dspark.benchmarks.server_audit.outcome import AuditReport, Outcome, Untested
from dspark.benchmarks.server_audit.sampled import (
    SampledFinding,
    draw_samples,
    is_stated,
    sampled_tests,
)
from dspark.errors import InputError

_WRONG_OFF = {"speculation": {"max_draft": -1}}
SAME_SERVER = "the same server without drafts"

Say = Callable[[str], None]


def find_reference(side: Side) -> Side | None:
    """The same server without drafts, `None` if it does not know how.

    A server that lets unknown fields pass would seem to obey; it is told apart by a value that
    one which knows the field must refuse.
    """
    knows = is_refused(side, _WRONG_OFF) is not None and is_refused(side, OFF) is None
    if not knows:
        return None
    return Side(
        api=side.api,
        model=side.model,
        top_logprobs=side.top_logprobs,
        extra={**side.extra, **OFF},
    )


def audit(
    side: Side,
    *,
    url: str,
    reference: Side | None,
    reference_name: str | None,
    chats: Sequence[Chat],
    config: AuditConfig,
    say: Say = lambda _: None,
) -> AuditReport:
    """All tests that the server allows. Raises `ServerFault` when it does not answer."""
    if not chats:
        raise InputError("An audit needs at least one prompt.")
    refusals = {p.name: _refusal(p, side, reference) for p in SAMPLED_PROFILES}
    greedy: list[GreedyFindings] = []
    for profile in (p for p in GREEDY_PROFILES if refusals[p.name] is None):
        if reference is None and not profile.is_stated:
            continue
        say(f"T=0, {profile.name}")
        greedy.append(
            greedy_tests(profile, side=side, reference=reference, chats=chats, config=config)
        )
    sampled: list[SampledFinding] = []
    answers: list[Answer] = []
    for profile in (p for p in SAMPLED_PROFILES if refusals[p.name] is None):
        if config.temperature == 0.0 or (reference is None and not is_stated(profile, config)):
            continue
        name = f"T={config.temperature:g}, {profile.name}"
        samples = draw_samples(
            profile,
            side=side,
            reference=reference,
            chats=chats[: config.sampled_prompts],
            config=config,
            on_answer=_progress(say, name),
        )
        sampled += sampled_tests(samples, config=config)
        answers += chain.from_iterable(samples.answers)
    return AuditReport(
        url=url,
        model=side.model,
        reference=reference_name if reference is not None else None,
        temperature=config.temperature,
        false_alarm=config.false_alarm,
        tests=[*(o for found in greedy for o in found.outcomes), *_judged(sampled, config)],
        untested=_untested(refusals, has_reference=reference is not None, config=config),
        divergences=[d for found in greedy for d in found.divergences],
        num_sampled_drafted=sum_told(answer.num_drafted for answer in answers),
        num_drafted=sum_told(found.num_drafted for found in greedy),
    )


def _untested(
    refusals: Mapping[str, str | None], *, has_reference: bool, config: AuditConfig
) -> list[Untested]:
    """`refusals`: why the server refuses the fields of a profile, by its name."""
    found = []
    if not has_reference:
        found.append(
            Untested(
                name="tokens and distribution of plain decoding",
                reason="the server cannot be told to answer without drafts; name a reference "
                "server with the same model by --reference",
            )
        )
    found += [Untested(name=n, reason=r) for n, r in refusals.items() if r is not None]
    if config.temperature not in (0.0, 1.0):
        found.append(
            Untested(
                name="chances as stated",
                reason="at other temperatures than 1 servers differ in what their "
                "log-probabilities mean",
            )
        )
    return found


def _progress(say: Say, name: str) -> OnAnswer:
    return lambda done, total: say(f"{name}: {done} of {total} answers")


def _refusal(profile: Profile, side: Side, reference: Side | None) -> str | None:
    if not profile.fields:
        return None
    refusals = (is_refused(each, profile.fields) for each in (side, reference) if each is not None)
    return next((reason for reason in refusals if reason is not None), None)


def _judged(found: Sequence[SampledFinding], config: AuditConfig) -> list[Outcome]:
    rejected = holm([f.finding.p_value for f in found], rate=config.false_alarm)
    return [
        Outcome(
            name=one.name,
            statistic=one.finding.statistic,
            p_value=one.finding.p_value,
            passed=not is_rejected,
            detail=one.detail,
        )
        for one, is_rejected in zip(found, rejected, strict=True)
    ]
