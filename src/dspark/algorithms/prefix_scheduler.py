"""The prefix scheduler: how many drafted tokens of each request are verified in a step.
It knows survivals, seconds and limits, neither tokens nor models nor what a step is made of.

    Theta(b) = (num_certain + the b largest survivals) / seconds(b)       tokens per second

or, where a second of the service is worth so many tokens (`foresight`), a step's gain

    tokens(b) - worth * seconds(b)

A survival a_{r,j} does not grow with j, so that the b best candidates are prefixes of their
requests. Which of the searches is exact depends on the coupling (method section 5):

    causal          Algorithm 1 over current survivals: walk down the ranking, stop at the first
                    step that does not improve Theta. Exact under every coupling.
    choose_budget,  Section 5.2: the budget is the global maximum of Theta over survivals known
    then admit      before this block was drawn; the block's own survivals only say which tokens
                    fill it. Exact under every coupling.
    free,           the global maximum of Theta, or of the gain, over current survivals. Exact
    free_gain       under shared noise and for greedy requests alone, whose text does not depend on
                    what is verified: under maximal coupling it favours tokens with promising
                    successors (Appendix A).
    priced          every token whose survival is above a price, the best of them up to a number;
                    both were known before the block was drawn (`terms`). Exact under every
                    coupling, and at its price `free_gain`'s choice where each token of the pass
                    costs the same.

Why all others are exact: whether (r, k) is verified must not depend on the value of x_{r,k},
and that shows in a_{r,j} for j > k only. Everything that decides about (r, k) stands before it in
the ranking, its successors stand behind it.
Letters: R requests, K positions, J candidates, B budgets 0..J.
"""

from dataclasses import dataclass

import numpy as np

from dspark.algorithms.ranking import (
    Floats,
    Ints,
    Ranking,
    Survivals,
    candidates,
    lengths_down_to,
    rank,
)
from dspark.algorithms.speed_floors import keeps_floors, least_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a step of every budget costs and what it yields for sure; known before the draft."""

    seconds_B: Floats
    """Seconds of a step that drafts, and verifies 0, 1, .. drafted tokens; its length bounds the
    budget."""
    num_certain: int
    """Tokens that the step commits without any draft: one for each request that gets a token."""
    plain_seconds: float | None
    """Seconds of the step without drafting; `None` if the block is drafted already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What single requests allow and ask for; known before the draft."""

    caps_R: Ints
    """Drafted tokens verified, at most."""
    floors_R: Floats | None = None
    """Tokens per second that each request shall get at least, 0 for no floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for a step, and why."""

    budget: int
    """Drafted tokens to verify, all requests together. 0 is plain decoding."""
    least_R: Ints | None
    """Those of them that must be verified, so that requests keep their floors."""
    rate: float
    """Predicted tokens per second of the choice."""
    plain_rate: float | None
    """The same of a step that drafts nothing; `None` if that was no choice any more."""
    rates_B: Floats
    """Theta: predicted tokens per second of every budget, drafting included."""
    unmet: tuple[int, ...] = ()
    """Requests whose floor no choice can keep."""


def causal(
    survival_RK: Survivals, prices: Prices, limits: Limits, least_R: Ints | None = None
) -> tuple[Choice, Ints]:
    """Algorithm 1 on the survivals of the block at hand: the choice, and lengths [R].

    The walk starts behind the tokens of `least_R`, which must have been chosen before the block
    was drawn (`choose_budget` does), and ends before a step that would break a floor.
    """
    ranking = rank(survival_RK, limits.caps_R, least_R)
    rates_B = _rates(ranking, prices)
    start = min(ranking.num_least, len(rates_B) - 1)
    stops_B = rates_B[start + 1 :] <= rates_B[start:-1]
    if limits.floors_R is not None:
        is_kept_B = keeps_floors(ranking, survival_RK, limits.floors_R, prices.seconds_B)
        stops_B |= ~is_kept_B[start + 1 :]
    budget = start + (int(np.argmax(stops_B)) if stops_B.any() else len(stops_B))
    choice = Choice(
        budget=budget,
        least_R=least_R,
        rate=float(rates_B[budget]),
        plain_rate=None,
        rates_B=rates_B,
    )
    return choice, ranking.lengths(budget)


def choose_budget(
    expected_RK: Survivals,
    prices: Prices,
    limits: Limits,
    *,
    incumbent: int | None = None,
    margin: float = 0.0,
) -> Choice:
    """The budget with the highest Theta over survivals known before the block is drawn.

    Not drafting at all competes, at `prices.plain_seconds`. The choice leaves `incumbent`, the
    budget of the step before, only for a gain of more than `margin` times its rate, so that noise
    does not move it. Ties go to the smaller budget.
    """
    return _best(expected_RK, prices, limits, incumbent=incumbent, margin=margin)[0]


def admit(survival_RK: Survivals, choice: Choice, caps_R: Ints) -> Ints:
    """Lengths [R]: the best `choice.budget` tokens by the survivals of the block at hand.

    Tokens that `choice.least_R` asks for come first. Fewer are admitted where fewer can survive.
    """
    return rank(survival_RK, caps_R, choice.least_R).lengths(choice.budget)


def free(survival_RK: Survivals, prices: Prices, limits: Limits) -> tuple[Choice, Ints]:
    """The highest Theta over the survivals of the block at hand: the choice, and lengths [R].

    Only for requests whose text does not depend on what is verified (see the top).
    """
    choice, ranking = _best(survival_RK, prices, limits, incumbent=None, margin=0.0)
    return choice, ranking.lengths(choice.budget)


def free_gain(survival_RK: Survivals, caps_R: Ints, *, seconds_B: Floats, worth: float) -> Ints:
    """Lengths [R] of the highest gain at the `worth` of a second in tokens; for the same requests
    as `free`. What the step does and costs whatever the budget is no matter."""
    value_KR = candidates(survival_RK, caps_R)
    falling_J = np.sort(value_KR, axis=None)[::-1]
    gain_B = -worth * seconds_B[: 1 + len(falling_J)]
    gain_B[1:] += np.cumsum(falling_J[: len(gain_B) - 1], dtype=np.float64)
    budget = int(gain_B.argmax())
    if budget and not falling_J[budget - 1]:  # those that cannot survive are no candidates
        budget = int(gain_B[: 1 + int(np.count_nonzero(falling_J))].argmax())
    if budget == 0:
        return np.zeros(len(survival_RK), dtype=np.int64)
    return lengths_down_to(value_KR, falling_J[budget - 1], budget)


def priced(survival_RK: Survivals, caps_R: Ints, *, price: float, most: int | None = None) -> Ints:
    """Lengths [R]: the tokens within the caps that survive with a chance above `price`; the best
    `most` of them."""
    lengths_R: Ints = np.minimum((survival_RK > np.float32(price)).sum(1), caps_R)
    if most is None or int(lengths_R.sum()) <= most:
        return lengths_R
    if most <= 0:
        return np.zeros_like(lengths_R)
    value_KR = candidates(survival_RK, lengths_R)
    place = value_KR.size - most
    return lengths_down_to(value_KR, np.partition(value_KR, place, axis=None)[place], most)


def _best(
    expected_RK: Survivals,
    prices: Prices,
    limits: Limits,
    *,
    incumbent: int | None,
    margin: float,
) -> tuple[Choice, Ranking]:
    least_R, floors_R = None, limits.floors_R
    if floors_R is not None:
        least_R, floors_R = least_lengths(
            expected_RK,
            floors_R,
            limits.caps_R,
            seconds_B=prices.seconds_B,
            plain_seconds=prices.plain_seconds,
        )
    ranking = rank(expected_RK, limits.caps_R, least_R)
    rates_B = _rates(ranking, prices)
    values_B = rates_B.copy()
    plain_rate = None
    if prices.plain_seconds is not None:
        # a block of which nothing is verified is never better than no block
        plain_rate = values_B[0] = prices.num_certain / prices.plain_seconds
    if floors_R is not None:
        _forbid(values_B, ranking, expected_RK, floors_R, prices)
    budget = int(np.argmax(values_B))
    if incumbent is not None:
        kept = min(incumbent, len(values_B) - 1)
        if values_B[budget] <= values_B[kept] * (1.0 + margin):
            budget = kept
    choice = Choice(
        budget=budget,
        least_R=least_R,
        rate=float(values_B[budget]),
        plain_rate=plain_rate,
        rates_B=rates_B,
        unmet=_unmet(limits.floors_R, floors_R),
    )
    return choice, ranking


def _rates(ranking: Ranking, prices: Prices) -> Floats:
    """Theta of every budget that the candidates and the prices allow."""
    tokens_B = ranking.tokens(prices.num_certain)[: len(prices.seconds_B)]
    rates_B: Floats = tokens_B / prices.seconds_B[: len(tokens_B)]
    return rates_B


def _forbid(
    values_B: Floats, ranking: Ranking, expected_RK: Survivals, floors_R: Floats, prices: Prices
) -> None:
    """Takes the budgets that break a floor out of the choice; budget 0 is plain where it can be."""
    is_allowed_B = keeps_floors(ranking, expected_RK, floors_R, prices.seconds_B)
    is_allowed_B[: ranking.num_least] = False
    if prices.plain_seconds is not None:
        is_allowed_B[0] = bool((floors_R * prices.plain_seconds <= 1.0).all())
    values_B[~is_allowed_B] = -np.inf


def _unmet(asked_R: Floats | None, kept_R: Floats | None) -> tuple[int, ...]:
    if asked_R is None or kept_R is None:
        return ()
    return tuple(int(r) for r in np.flatnonzero(asked_R != kept_R))
