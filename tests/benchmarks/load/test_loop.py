"""Steady states of a real engine on a clock that is a formula."""

from itertools import islice, pairwise

import pytest

from dspark.benchmarks.load.deck import Deck
from dspark.benchmarks.load.loop import ClosedLoad, poisson, run_closed, run_open
from dspark.core import Coupling
from dspark.engine.cycle import Cycle
from dspark.models.target import Target
from tests.toy_load import (
    BLOCK_SIZE,
    FakeClock,
    OracleDraft,
    TimedEngine,
    bigram_target,
    config_of,
    next_tokens,
    tasks,
)
from tests.toys import toy_drafter


@pytest.fixture(scope="module")
def target() -> Target:
    return bigram_target()


def timed(target: Target, num_users: int, *, is_drafting: bool = True) -> TimedEngine:
    drafter = toy_drafter(target, block_size=BLOCK_SIZE) if is_drafting else None
    cycle = Cycle(target, drafter=drafter, config=config_of(num_users))
    if is_drafting:
        cycle._proposer = OracleDraft(next_tokens(target))
    return TimedEngine(cycle, FakeClock())


def deck(*, seed: int = 0, max_new_tokens: int = 20, is_whole: bool = False) -> Deck:
    return Deck(
        tasks=tasks(),
        temperature=0.0,
        max_new_tokens=max_new_tokens,
        coupling=Coupling.MAXIMAL,
        seed=seed,
        is_whole=is_whole,
    )


def test_a_closed_load_counts_full_steps_only(target: Target) -> None:
    """Ramp-up and drain are left out: in every counted step each user decodes or is refilled."""
    engine = timed(target, 3, is_drafting=False)
    found = run_closed(engine, deck(), num_users=3, num_tokens=90, clock=engine.clock)
    assert found.tokens >= 90
    counted = engine.steps[-found.num_steps :]
    for before, after in pairwise(counted):
        num_ended = sum(item.finish_reason is not None for item in before.rounds)
        assert sum(item.is_prefill for item in after.rounds) == num_ended  # asks again at once
        assert len(after.rounds) == 3
    assert found.tokens == sum(len(r.token_ids) for s in counted for r in s.rounds)
    assert found.tokens == 3 * found.num_steps
    assert 0.95 * 3 < found.in_flight < 3
    assert found.counts.planned == found.counts.drafting == 0
    assert not engine.has_work  # everybody has left


def test_speeds_are_tokens_over_the_seconds_of_the_clock(target: Target) -> None:
    engine = timed(target, 2)
    found = run_closed(engine, deck(), num_users=2, num_tokens=60, clock=engine.clock)
    counted = engine.steps[-found.num_steps :]
    rounds = [r for s in counted for r in s.rounds if not r.is_prefill]
    assert found.counts.rounds == len(rounds)
    assert found.counts.planned == sum(r.num_planned for r in rounds)
    assert found.counts.accepted == sum(r.num_accepted for r in rounds)
    assert found.counts.tau is not None
    assert found.counts.tau > 1.5
    assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
    assert found.per_user_tokens_per_s == pytest.approx(found.tokens_per_s / 2, rel=0.1)
    assert set(found.domains) == {"math", "code", "chat"}


def test_every_policy_meets_the_same_requests(target: Target) -> None:
    """At temperature 0 the asked prompts are the same in the same order whatever is drafted."""
    asked = []
    for is_drafting in (False, True):
        engine = timed(target, 2, is_drafting=is_drafting)
        seen: list[tuple[int, ...]] = []
        submit = engine.cycle.submit
        engine.cycle.submit = lambda r, s=submit, seen=seen: (  # type: ignore[method-assign]
            seen.append(tuple(r.prompt_ids)),
            s(r),
        )[1]
        run_closed(engine, deck(), num_users=2, num_tokens=80, clock=engine.clock)
        asked.append(seen)
    shorter = min(map(len, asked))
    assert shorter >= 5
    assert asked[0][:shorter] == asked[1][:shorter]
    assert len(set(islice(asked[0], shorter))) >= 5


@pytest.mark.parametrize("num_users", [1, 4])
def test_between_two_totals_whatever_drafts_did_the_same_work(
    target: Target, num_users: int
) -> None:
    """Whole answers of one length: as many tokens come with as many prompts, save for answers that
    just end or do not."""
    length, loads = 20, []
    for is_drafting in (False, True):
        engine = timed(target, num_users, is_drafting=is_drafting)
        asked = deck(max_new_tokens=length, is_whole=True)
        load = ClosedLoad(engine, asked, num_users=num_users, clock=engine.clock)
        load.ramp_up()
        loads.append(load)
    start = max(load.num_tokens for load in loads)
    for load in loads:
        load.run_to(start)
    totals = [[0, 0], [0, 0]]
    for stretch in range(1, 4):
        end = start + stretch * 2 * num_users * length
        for total, load in zip(totals, loads, strict=True):
            found = load.run_to(end)
            total[0] += found.tokens
            total[1] += found.prompt_tokens
            assert 0 <= load.num_tokens - end < num_users * (BLOCK_SIZE + 1)
    (plain, plain_prompts), (drafted, drafted_prompts) = totals
    assert plain == pytest.approx(6 * num_users * length, abs=num_users)
    assert drafted == pytest.approx(plain, abs=num_users * (BLOCK_SIZE + 1))
    assert plain_prompts == 5 * 6 * num_users
    assert drafted_prompts == pytest.approx(plain_prompts, abs=5 * (num_users - 1))


def test_an_open_load_serves_what_arrives_and_no_more(target: Target) -> None:
    engine = timed(target, 8)
    arrivals = list(islice(poisson(deck(), rate=2.0), 40))
    found = run_open(engine, arrivals, seconds=8.0, clock=engine.clock)
    assert found.seconds == pytest.approx(6.0, rel=0.05)  # the first quarter is left out
    served = [a for a in arrivals if 2.0 <= a.at_s < 8.0]
    assert len(found.ttft_s) == pytest.approx(len(served), abs=1)
    assert found.tokens == pytest.approx(20 * len(served), abs=40)  # answers of 20 tokens
    assert found.in_flight < 2
    assert all(0.0 < wait < 0.5 for wait in found.ttft_s)


def test_arrivals_have_the_rate_and_are_a_function_of_the_seed() -> None:
    found = list(islice(poisson(deck(), rate=5.0), 400))
    assert found[-1].at_s == pytest.approx(80, rel=0.2)
    assert found == list(islice(poisson(deck(), rate=5.0), 400))
    assert found != list(islice(poisson(deck(seed=1), rate=5.0), 400))


def test_a_load_without_end_lasts_until_all_is_answered(target: Target) -> None:
    engine = timed(target, 4)
    arrivals = list(islice(poisson(deck(max_new_tokens=8), rate=5.0), 6))
    found = run_open(engine, arrivals, seconds=float("inf"), clock=engine.clock, warm_share=0.0)
    assert found.tokens == 6 * 8
    assert len(found.ttft_s) == 6


def test_an_overloaded_engine_keeps_people_waiting(target: Target) -> None:
    engine = timed(target, 2, is_drafting=False)
    found = run_open(engine, poisson(deck(), rate=50.0), seconds=2.0, clock=engine.clock)
    assert found.in_flight == pytest.approx(2, rel=0.1)
    assert max(found.ttft_s) > 0.5
    assert not engine.has_work
