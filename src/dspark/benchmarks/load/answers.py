"""A load report in words: the four questions a buyer asks (method section 8), then the claims.

It computes nothing but which sentence to say.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from dspark.benchmarks.load.config import AUTO, MTP1, NONE
from dspark.benchmarks.load.frontier import Gains
from dspark.benchmarks.load.report import LoadPoint, LoadRun, Versus

_LEVELS = (100.0, 80.0, 60.0, 50.0, 40.0, 30.0, 20.0, 15.0, 10.0, 5.0, 2.0, 1.0)
"""Service levels to speak of, tokens a second for each user."""


def answers(run: LoadRun) -> list[str]:
    """The four answers of one temperature, about the best policy there is: auto if it ran."""
    policy = AUTO if AUTO in run.policies else next(iter(run.policies), None)
    if policy is None:
        return []
    points = run.policies[policy]
    plain = run.policies.get(NONE)
    return [
        "How fast does one user's text come? " + _speeds(policy, points, plain),
        "Which service level holds up to which load? " + _service_levels(policy, points, plain),
        "What is the total while everyone streams? " + _totals(policy, points, plain),
        "What did the budget do? " + _budgets(policy, points),
    ]


def claims(run: LoadRun) -> Iterator[str]:
    """What is promised of `auto`, and whether it holds; nothing where it did not run."""
    if run.auto_over_best:
        yield "auto over the best other policy, by users: " + ", ".join(
            f"{load}: x{v.ratio:.3f}{_spread(v)} ({v.policy})"
            for load, v in run.auto_over_best.items()
        )
    if run.auto_over_best_single is not None:
        yield (
            f"geometric mean over all loads: x{run.auto_over_best_single:.3f} of the best single "
            f"policy, {run.best_single}"
        )
    for name, gains in ((MTP1, run.against_mtp1), (NONE, run.against_none)):
        if gains is not None:
            yield f"against {name}: {_gains(gains)}"
    if run.auto_over_plain:
        slower = [load for load, v in run.auto_over_plain.items() if v.ratio < 1.0]
        if slower:
            yield f"auto is slower than plain decoding with {', '.join(slower)} users."
    domains = _domain_order(run)
    if domains is not None:
        yield domains
    if run.largest_prediction_error is not None:
        yield (
            "the simulator, with a profile taken in turns with each closed load, is off by at most "
            f"{run.largest_prediction_error:.1%}"
        )
    if run.largest_live_prediction_error is not None:
        yield (
            "with the profile of before, as the steps of auto corrected it, it is off by at most "
            f"{run.largest_live_prediction_error:.1%}"
        )


def _speeds(
    policy: str, points: Mapping[str, LoadPoint], plain: Mapping[str, LoadPoint] | None
) -> str:
    return f"{policy}, tokens/s of each user: " + ", ".join(
        f"{load} {_users(load)} {p.per_user_tokens_per_s:.1f}"
        + _beside(plain, load, p, lambda q: q.per_user_tokens_per_s)
        for load, p in points.items()
    )


def _service_levels(
    policy: str, points: Mapping[str, LoadPoint], plain: Mapping[str, LoadPoint] | None
) -> str:
    """The most users at whom each still gets a level that some load of the policy holds."""
    parts: list[tuple[str, str]] = []
    for level in _LEVELS:
        most = _most_users(points, level)
        if most is None or (parts and parts[-1][0] == most):
            continue
        beside = ""
        if plain is not None:
            held = _most_users(plain, level)
            beside = f" (plain: {'none' if held is None else held})"
        parts.append((most, f"{level:g} tokens/s each up to {most} {_users(most)}{beside}"))
    if not parts:
        return f"{policy} holds {_LEVELS[-1]:g} tokens/s for nobody."
    return f"{policy} holds " + "; ".join(text for _, text in parts)


def _most_users(points: Mapping[str, LoadPoint], level: float) -> str | None:
    held = [load for load, p in points.items() if p.per_user_tokens_per_s >= level]
    return max(held, key=float) if held else None


def _totals(
    policy: str, points: Mapping[str, LoadPoint], plain: Mapping[str, LoadPoint] | None
) -> str:
    return f"{policy}, tokens/s of all users: " + ", ".join(
        f"{load} {_users(load)} {p.tokens_per_s:.0f}"
        + _beside(plain, load, p, lambda q: q.tokens_per_s)
        for load, p in points.items()
    )


def _budgets(policy: str, points: Mapping[str, LoadPoint]) -> str:
    return f"{policy}, drafted tokens verified for each request and step: " + ", ".join(
        f"{load} {_users(load)} {p.budget_per_request or 0.0:.2f}"
        f" ({p.drafting_share or 0.0:.0%} drafted)"
        for load, p in points.items()
    )


def _beside(
    plain: Mapping[str, LoadPoint] | None,
    load: str,
    point: LoadPoint,
    value_of: Callable[[LoadPoint], float],
) -> str:
    if plain is None or load not in plain or plain[load] is point:
        return ""
    return f" (x{value_of(point) / value_of(plain[load]):.2f} plain)"


def _users(load: str) -> str:
    return "user" if load == "1" else "users"


def _spread(found: Versus) -> str:
    """The middle half of the rounds."""
    if found.quartiles is None:
        return ""
    return " [{:.3f}, {:.3f}]".format(*found.quartiles)


def _gains(gains: Gains) -> str:
    reached = [g for g in gains.per_user_gain_at_matched_throughput if g is not None]
    text = "no throughput that both reach"
    if reached:
        text = (
            f"{min(reached):+.0%} to {max(reached):+.0%} per-user speed at matched throughput "
            f"({len(reached)} of {len(gains.per_user_gain_at_matched_throughput)} points)"
        )
    if gains.throughput_gain_at_middle_speed is not None:
        text += (
            f", {gains.throughput_gain_at_middle_speed:+.0%} throughput at "
            f"{gains.middle_speed:.1f} tokens/s for each user"
        )
    return text


def _domain_order(run: LoadRun) -> str | None:
    """Budget by domain, mean over the closed loads of `auto`."""
    points = run.policies.get(AUTO)
    if not points:
        return None
    domains = list(dict.fromkeys(d for p in points.values() for d in p.budget_by_domain))
    if len(domains) < 2:
        return None
    means = {domain: _mean([p.budget_by_domain.get(domain) for p in points.values()])
             for domain in domains}  # fmt: skip
    ranked = sorted(means, key=means.__getitem__, reverse=True)
    return "budget by domain: " + ", ".join(f"{d} {means[d]:.2f}" for d in ranked)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
