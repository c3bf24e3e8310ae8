"""The profiler against a clock that it can be checked by: time passes with the tokens that ran."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.algorithms.fingerprint import Fingerprint
from dspark.engine import cycle
from dspark.engine.draft_pass import DraftPass
from dspark.engine.judge import judge
from dspark.engine.profiler import ProfileConfig, profile
from dspark.engine.step_bench import turns
from dspark.models.target import Target
from tests.toys import toy_drafter, toy_target

CONFIG = ProfileConfig(max_requests=4, seconds_each=0.0, min_rounds=3, max_rounds=3)


class WorkClock:
    """1 ms for each step of the target, 0.1 ms for each of its tokens, 2 ms for each block, all
    of it `times` as long; for sampled requests `per_sampled` seconds more for each row of logits,
    and as much for each block.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        slow_every: int = 0,
        per_sampled: float = 0.0,
        times: float = 1.0,
    ) -> None:
        self.now, self._num_passes = 0.0, 0
        self.times = times
        self.rows: list[list[int]] = []
        """Tokens of each request in each pass; a request without any only fills the layout."""
        forward, propose = Target.forward, DraftPass.propose

        def timed_forward(target, ids_N, **rest):
            self._num_passes += 1
            self.rows.append([n for n in rest["layout"].query_starts_R1.diff().tolist() if n])
            is_slow = slow_every and self._num_passes % slow_every == 0
            self.now += self.times * (1e-3 + 1e-4 * len(ids_N)) * (50.0 if is_slow else 1.0)
            return forward(target, ids_N, **rest)

        def timed_propose(drafter, requests, **rest):
            self.now += self.times * 2e-3
            self.now += per_sampled * sum(not live.params.is_greedy for live in requests)
            return propose(drafter, requests, **rest)

        def timed_judge(requests, logits_NV, **rest):
            if any(not live.params.is_greedy for live in requests):
                self.now += per_sampled * len(logits_NV)
            return judge(requests, logits_NV, **rest)

        monkeypatch.setattr(Target, "forward", timed_forward)
        monkeypatch.setattr(DraftPass, "propose", timed_propose)
        monkeypatch.setattr(cycle, "judge", timed_judge)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("slow_every", [0, 11])
def test_the_table_holds_what_each_size_took(
    monkeypatch: pytest.MonkeyPatch, slow_every: int
) -> None:
    """UC-134, UC-146: exact for every number of tokens; steps that hang move nothing."""
    target = toy_target()
    clock = WorkClock(monkeypatch, slow_every=slow_every)
    cost = profile(
        target,
        toy_drafter(target),
        fingerprint=Fingerprint.of(target="toy"),
        config=CONFIG,
        clock=clock,
    )
    assert [row.num_requests for row in cost.verify] == [1, 2, 4]
    for row in cost.verify:
        count = row.num_requests
        tokens = np.array([count * (1 + width) for width in range(5)])
        context = np.array([count * cost.context])
        found = cost.verify_seconds(count, tokens, context)
        np.testing.assert_allclose(found, 1e-3 + 1e-4 * tokens, rtol=0.05)
        assert cost.draft_seconds(np.array([count]), context)[0] == pytest.approx(2e-3, rel=0.05)
    prompt = cost.verify_seconds(1, np.array([1 + 32]), np.array([cost.context]))
    assert prompt[0] == pytest.approx(1e-3 + 33e-4, rel=0.1)


def test_a_slow_machine_is_given_less_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a minute of work at this pace, while somebody waits: prompts are shorter and
    turns fewer, and each size is as it is."""
    target = toy_target()
    clock = WorkClock(monkeypatch, times=100.0)
    cost = profile(
        target,
        toy_drafter(target),
        fingerprint=Fingerprint.of(target="toy"),
        config=replace(CONFIG, min_rounds=4),
        clock=clock,
    )
    assert clock.now < 60
    for row in cost.verify:
        count = row.num_requests
        tokens = np.array([count * (1 + width) for width in range(5)])
        found = cost.verify_seconds(count, tokens, np.array([count * cost.context]))
        np.testing.assert_allclose(found, 100 * (1e-3 + 1e-4 * tokens), rtol=0.05)
    assert cost.sampled is not None


def test_what_sampled_requests_take_more_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond the numbers of requests at which it is measured."""
    target = toy_target()
    cost = profile(
        target,
        toy_drafter(target),
        fingerprint=Fingerprint.of(target="toy"),
        config=replace(CONFIG, max_requests=16, max_step_tokens=128),
        clock=WorkClock(monkeypatch, per_sampled=2e-4),
    )
    assert cost.sampled is not None
    assert [row.num_requests for row in cost.sampled.verify] == [1, 8, 16]
    for count in (1, 3, 8, 16, 32):
        rows = np.array([count * (1 + width) for width in range(5)])
        np.testing.assert_allclose(cost.sampled_seconds(count, rows), 2e-4 * rows, rtol=1e-6)
        found = cost.sampled_draft_seconds(np.array([count]))
        assert found[0] == pytest.approx(2e-4 * count, rel=1e-6)
    greedy = cost.verify_seconds(4, np.array([8]), np.array([4 * cost.context]))
    assert greedy[0] == pytest.approx(1e-3 + 8e-4, rel=0.05)


def test_a_machine_that_changes_its_speed_changes_it_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice as slow from the middle of its rows on: what they say of each other stays true."""
    target = toy_target()
    options = {"fingerprint": Fingerprint.of(target="toy"), "config": replace(CONFIG, min_rounds=4)}
    clock, ends = WorkClock(monkeypatch), list[float]()
    steady = profile(
        target,
        toy_drafter(target),
        clock=clock,
        on_size=lambda _done, _all: ends.append(clock.now),
        **options,
    )
    half, begun = 0.5 * ends[-1], clock.now
    changing = profile(
        target,
        toy_drafter(target),
        clock=lambda: clock.now + max(clock.now - begun - half, 0.0),
        **options,
    )
    ratios = [
        now.curve.seconds[i] / then.curve.seconds[i]
        for now, then in zip(changing.verify, steady.verify, strict=True)
        for i in range(5)
    ]
    assert max(ratios) < 1.4 * min(ratios)  # 2 where one row follows the other


def test_every_size_is_one_that_can_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """UC-133: beside prompts, between one token and a block for each request, and all of these."""
    assert CONFIG.ladder == [1, 2, 4]
    assert ProfileConfig(max_requests=12).ladder == [1, 3, 6, 12]
    target = toy_target()
    clock = WorkClock(monkeypatch)
    drafter = toy_drafter(target)
    profile(target, drafter, fingerprint=Fingerprint.of(target="toy"), config=CONFIG, clock=clock)
    most = 1 + drafter.config.block_size
    decoding = {tuple(rows) for rows in clock.rows if max(rows) <= most}
    assert decoding == {(size,) * count for count in CONFIG.ladder for size in range(1, 1 + most)}


def test_steps_behind_a_change_between_drafting_and_not_are_not_timed() -> None:
    """A plain step behind one that drafts finds its weights out of the caches."""
    assert turns([2, 0, 1]) == [
        (2, False),
        (2, True),
        (1, True),
        (0, False),
        (0, True),
        (0, True),
    ]
    assert turns([3]) == [(3, False), (3, True)]
