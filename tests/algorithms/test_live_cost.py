"""Live measurements correct the table: robustly, locally, and forgetting what is old."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.algorithms.live_cost import CostRatios, Part, StepSample, merged
from dspark.algorithms.step_cost import ContextCost, StepCost, VerifyRow
from tests.algorithms.test_two_speeds import STATES, TOKENS
from tests.algorithms.toy_costs import (
    curve,
    draft_seconds_of,
    linear_cost,
    sampled_cost,
    seconds_of,
)


def verify_sample(cost: StepCost, requests: int, tokens: int, factor: float) -> StepSample:
    return StepSample(
        part=Part.VERIFY,
        num_requests=requests,
        num_tokens=tokens,
        context=requests * cost.context,
        seconds=factor * seconds_of(cost, requests, tokens),
    )


def draft_sample(cost: StepCost, requests: int, factor: float) -> StepSample:
    return StepSample(
        part=Part.DRAFT,
        num_requests=requests,
        num_tokens=0,
        context=requests * cost.context,
        seconds=factor * draft_seconds_of(cost, requests),
    )


def test_without_samples_nothing_changes():
    assert merged(linear_cost(), []) == linear_cost()


def test_a_machine_that_turned_slow_is_followed_everywhere_within_the_window():
    """Half of the window is enough to turn the median; entries nobody visited follow."""
    cost = linear_cost()
    old = [verify_sample(cost, 4, 8, 1.0) for _ in range(200)]
    new = [verify_sample(cost, 4, 8, 3.0) for _ in range(32)]
    found = merged(cost, [*old, *new])
    for requests, tokens in ((4, 4), (1, 3), (64, 200)):
        ratio = seconds_of(found, requests, tokens) / seconds_of(cost, requests, tokens)
        assert ratio == pytest.approx(3.0, rel=0.01)
    # the drafter was not measured, so that nothing is said about it
    assert draft_seconds_of(found, 4) == draft_seconds_of(cost, 4)


def test_a_part_of_the_table_that_is_ten_times_wrong_is_corrected_where_it_is_visited():
    cost = linear_cost()
    samples = [verify_sample(cost, 4, 4, 1.0) for _ in range(32)]
    samples += [verify_sample(cost, 4, 24, 10.0) for _ in range(32)]
    samples += [verify_sample(cost, 4, 4, 1.0) for _ in range(32)]
    found = merged(cost, samples)
    assert seconds_of(found, 4, 4) == pytest.approx(seconds_of(cost, 4, 4), rel=0.1)
    assert seconds_of(found, 4, 24) > 6.0 * seconds_of(cost, 4, 24)


def test_the_drafter_is_corrected_apart():
    """UC-139: a drafter ten times as slow as profiled."""
    cost = linear_cost()
    found = merged(cost, [draft_sample(cost, 2, 10.0) for _ in range(40)])
    assert draft_seconds_of(found, 2) == pytest.approx(10.0 * draft_seconds_of(cost, 2))
    assert seconds_of(found, 2, 6) == seconds_of(cost, 2, 6)


def test_outliers_are_dropped():
    """UC-146: every tenth step takes fifty times as long (a prompt, another process)."""
    cost = linear_cost()
    rng = np.random.default_rng(0)
    samples = [
        verify_sample(cost, 4, 12, 50.0 if i % 10 == 0 else 1.2 + 0.02 * rng.standard_normal())
        for i in range(64)
    ]
    found = merged(cost, samples)
    assert seconds_of(found, 4, 12) / seconds_of(cost, 4, 12) == pytest.approx(1.2, rel=0.02)


def test_steps_of_two_kinds_half_and_half_lie_around_the_speed():
    """A calm time, then a process that comes and goes: the median is near none of the two."""
    cost = linear_cost()
    factors = 256 * [1.0] + 16 * [1.0, 4.0]
    found = merged(cost, [draft_sample(cost, 2, factor) for factor in factors])
    assert 1.0 < draft_seconds_of(found, 2) / draft_seconds_of(cost, 2) < 4.0


def test_old_samples_are_forgotten():
    cost = linear_cost()
    slow_then_back = [
        *[verify_sample(cost, 16, 32, 4.0) for _ in range(100)],
        *[verify_sample(cost, 16, 32, 1.0) for _ in range(32)],
    ]
    assert seconds_of(merged(cost, slow_then_back), 16, 32) == pytest.approx(
        seconds_of(cost, 16, 32), rel=0.01
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_sampled_requests_take_more_corrects_nothing(share: float) -> None:
    """A table that knows of it is as right for them as for greedy ones; a slow machine is slow
    for both."""
    cost = replace(linear_cost(), sampled=sampled_cost(per_row=2e-3, per_request=1e-3))
    more = share * 2e-3 * 8
    for slow in (1.0, 2.0):
        verify = verify_sample(cost, 4, 8, 1.0)
        draft = draft_sample(cost, 4, 1.0)
        samples = 40 * [
            verify._replace(sampled=share, seconds=slow * (verify.seconds + more)),
            draft._replace(sampled=share, seconds=slow * (draft.seconds + share * 4e-3)),
        ]
        found = merged(cost, samples)
        assert seconds_of(found, 4, 8) == pytest.approx(slow * seconds_of(cost, 4, 8), rel=1e-3)
        assert draft_seconds_of(found, 4) == pytest.approx(slow * draft_seconds_of(cost, 4))
        assert found.sampled_seconds(4, np.array([8]))[0] == pytest.approx(
            slow * 2e-3 * 8, rel=1e-3
        )


def test_merging_twice_from_the_profile_is_the_same_as_once():
    """The profile stays the base: corrections never pile up."""
    cost = linear_cost()
    samples = [verify_sample(cost, 4, 8, 2.0) for _ in range(10)]
    assert merged(cost, samples) == merged(cost, samples)
    assert seconds_of(merged(cost, samples), 4, 8) == pytest.approx(
        2 * seconds_of(cost, 4, 8), rel=1e-3
    )


def test_entries_are_compared_within_a_stretch_of_time_only():
    """The machine swings by a half, and every entry is seen at times of its own: what was seen
    last is neither dear nor cheap for that. Their own factors come out all the same."""
    cost, rng = linear_cost(), np.random.default_rng(0)
    own = {4: 0.9, 8: 0.9, 16: 1.2, 24: 1.1}
    samples, speeds = [], []
    for number in range(1024):
        speed = 1.25 + 0.5 * np.sin(number / 60)
        speeds.append(speed)
        # one entry is usual, and which of the others is seen beside it changes slowly
        tokens = 8 if number % 4 else [4, 16, 24][number // 64 % 3]
        factor = own[tokens] * speed * float(np.exp(rng.normal(0.0, 0.05)))
        samples.append(verify_sample(cost, 4, tokens, factor))
    # two entries a row: 4 and 24 tokens; what is nearer to one of them is taken for it
    found = merged(cost, samples, num_samples=1024)
    cost_of = {n: seconds_of(found, 4, n) / seconds_of(cost, 4, n) for n in (4, 24)}
    low = np.average([own[4], own[8]], weights=[1, 9])
    high = np.average([own[16], own[24]])
    assert cost_of[24] / cost_of[4] == pytest.approx(high / low, rel=0.03)
    assert cost_of[4] == pytest.approx(low * np.mean(speeds[-32:]), rel=0.04)


def two_states() -> tuple[StepCost, StepCost]:
    """Passes of 4 requests on a machine in two states; see `test_two_speeds`."""
    rows = [
        VerifyRow(num_requests=4, curve=curve(TOKENS, dict(zip(TOKENS, ms, strict=True)).get))
        for ms in STATES.values()
    ]
    slow, fast = (replace(linear_cost(), verify=(row,)) for row in rows)
    return slow, fast


def mixed_samples(cost: StepCost, count: int) -> list[StepSample]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        requests = int(rng.choice([1, 2, 3, 5, 8, 40]))
        factor = float(np.exp(rng.normal(0.3, 0.3)))
        if rng.random() < 0.4:
            sample = draft_sample(cost, requests, factor)
        else:
            sample = verify_sample(cost, requests, requests + int(rng.integers(9)), factor)
        samples.append(
            sample._replace(context=int(rng.integers(1, 20000)), sampled=rng.choice([0.0, 0.5, 1]))
        )
    return samples


@pytest.mark.parametrize("num_samples", [37, 256])
def test_the_last_samples_of_a_part_count(num_samples: int):
    """Drafts have no tilt, and are those of the last samples alone."""
    cost = replace(linear_cost(), sampled=sampled_cost(per_row=4e-4, per_request=2e-4))
    samples = mixed_samples(cost, 4000)
    drafts = [s for s in samples if s.part is Part.DRAFT]
    verifies = [s for s in samples if s.part is Part.VERIFY]
    last = [*drafts[-num_samples:], *verifies[-num_samples:]]
    long, short = merged(cost, samples, num_samples=num_samples), merged(cost, last)
    assert long.draft == short.draft
    assert seconds_of(long, 4, 12) == pytest.approx(seconds_of(short, 4, 12), rel=0.03)


def test_a_change_of_memory_beside_products_reaches_entries_that_were_not_seen():
    """Plain passes and wide ones were seen in the new state; those in between follow by their
    share of products, where one factor would be wrong for all."""
    cost, truth = two_states()
    samples = [
        verify_sample(cost, 4, tokens, seconds_of(truth, 4, tokens) / seconds_of(cost, 4, tokens))
        for tokens in 40 * [4, 20]
    ]
    found = merged(cost, samples)
    for tokens in (4, 8, 12, 16, 20, 24):
        assert seconds_of(found, 4, tokens) == pytest.approx(seconds_of(truth, 4, tokens), rel=0.06)


def test_a_few_rows_of_the_table_are_those_of_the_whole():
    cost = replace(
        linear_cost(context_cost=ContextCost(held=1e-5, attended=2e-6, draft_held=1e-5)),
        sampled=sampled_cost(per_row=4e-4, per_request=2e-4),
    )
    ratios = CostRatios(cost)
    for sample in mixed_samples(cost, 400):
        ratios.add(sample)
    ratios.add(StepSample(Part.VERIFY, num_requests=1, num_tokens=2, context=70, seconds=0.0))
    whole = ratios.table(range(len(cost.verify)))
    assert whole != cost
    for requests in (1, 3, 7, 1000):
        part, tokens_N = ratios.table(cost.rows_around(requests)), np.arange(1, 70)
        np.testing.assert_array_equal(
            part.verify_seconds(requests, tokens_N, np.array([500])),
            whole.verify_seconds(requests, tokens_N, np.array([500])),
        )
