"""The profile beside a load against a clock that it can be checked by."""

from collections.abc import Sequence

import numpy as np
import pytest

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import StepCost, VerifyRow
from dspark.core import Coupling, SamplingParams
from dspark.engine import side_profile
from dspark.engine.side_profile import SideProfile
from tests.engine.test_profiler import WorkClock
from tests.toys import toy_drafter, toy_target

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, coupling=Coupling.MAXIMAL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    return WorkClock(monkeypatch)


def beside(
    clock: WorkClock, cost: StepCost, *, num_requests: int, params: SamplingParams = GREEDY
) -> SideProfile:
    target = toy_target()
    return SideProfile(
        target,
        toy_drafter(target),
        cost=cost,
        num_requests=num_requests,
        num_prompt_tokens=12,
        max_step_tokens=64,
        params=params,
        clock=clock,
    )


def profiled() -> StepCost:
    """What a profile by `WorkClock` finds."""
    sizes = (1, 2, 3, 4, 5, 8, 12, 16, 20, 33, 64)

    def curve(sizes: Sequence[int], seconds: Sequence[float]) -> CostCurve:
        return CostCurve(sizes=tuple(sizes), seconds=tuple(seconds), errors=(0.0,) * len(sizes))

    rows = [
        VerifyRow(num_requests=count, curve=curve(own, [1e-3 + 1e-4 * size for size in own]))
        for count in (1, 2, 4)
        if (own := [size for size in sizes if size >= count])
    ]
    return StepCost(
        fingerprint=Fingerprint.of(target="toy"),
        block_size=4,
        context=32,
        draft=curve((1, 2, 4), [2e-3] * 3),
        verify=tuple(rows),
    )


def seconds_of(cost: StepCost, num_requests: int, num_tokens: int, num_prompt: int = 0) -> float:
    context = np.array([num_requests * cost.context])
    return float(
        cost.verify_seconds(
            num_requests,
            np.array([num_tokens + num_prompt]),
            context,
            num_prompt_tokens=num_prompt,
        )[0]
    )


@pytest.mark.parametrize("num_requests", [1, 3, 4])
def test_it_finds_what_steps_take_now(clock: WorkClock, num_requests: int) -> None:
    """Three times as long as when it was profiled, every part of a step; three requests have no row
    in the profile."""
    cost = profiled()
    clock.times = 3.0
    side = beside(clock, cost, num_requests=num_requests)
    for _ in range(12):
        side.take()
    table = side.table()
    assert table is not None
    for count in {num_requests, 1, 2, 4}:
        for width in range(cost.block_size + 1):
            tokens = count * (1 + width)
            # of three requests the profile knows what two and four take, which is nearly theirs
            near = None if count == num_requests or num_requests != 3 else 0.02
            expected = pytest.approx(3e-3 + 3e-4 * tokens, rel=near)
            assert seconds_of(table, count, tokens) == expected
    for drafting in (1, 2, 4):
        drafts = table.draft_seconds(np.array([drafting]), np.array([drafting * cost.context]))
        assert drafts[0] == pytest.approx(6e-3)
    assert seconds_of(table, 2, 2, num_prompt=20) == pytest.approx(3e-3 + 3e-4 * 22, rel=0.02)


def test_widths_that_had_no_turn_yet_follow_the_others(clock: WorkClock) -> None:
    cost = profiled()
    side = beside(clock, cost, num_requests=2)
    assert side.table() is None
    clock.times = 2.0
    side.take()
    table = side.table()
    assert table is not None
    for width in range(5):
        assert seconds_of(table, 2, 2 + 2 * width) == pytest.approx(2e-3 + 4e-4 * (1 + width))


def test_pauses_count_as_they_do_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkClock(monkeypatch, slow_every=5)  # each fifth pass takes fifty times as long
    cost = profiled()
    side = beside(clock, cost, num_requests=1)
    for _ in range(60):
        side.take()
    ratio = seconds_of(side.table(), 1, 3) / seconds_of(cost, 1, 3)
    assert 0.5 * (1 + 49 / 5) < ratio < 2.0 * (1 + 49 / 5)


def test_sampled_requests_are_priced_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they cost more is in the table, which takes all requests for alike."""
    clock = WorkClock(monkeypatch, per_sampled=1e-3)
    cost = profiled()
    clock.times = 2.0
    side = beside(clock, cost, num_requests=2, params=SAMPLED)
    for _ in range(6):
        side.take()
    table = side.table()
    assert table is not None
    assert table.sampled is None
    assert seconds_of(table, 2, 6) == pytest.approx(2e-3 + 2e-4 * 6 + 1e-3 * 6)


def test_it_goes_on_with_new_requests_when_the_pages_are_full(
    monkeypatch: pytest.MonkeyPatch, clock: WorkClock
) -> None:
    monkeypatch.setattr(side_profile, "_FEWEST_ROUNDS", 1)
    monkeypatch.setattr(side_profile, "_ROUNDS", 1)
    opened, side = [], beside(clock, profiled(), num_requests=4)
    for _ in range(40):
        side.take()
        opened.append(side._bench)
        assert seconds_of(side.table(), 4, 8) == pytest.approx(1.8e-3)
    assert len(set(map(id, opened))) > 1
