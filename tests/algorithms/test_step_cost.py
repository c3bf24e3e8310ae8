"""The table of step costs: lookups, context, prices, fingerprint, JSON."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.prefix_scheduler import Limits, choose_budget
from dspark.algorithms.step_cost import (
    ContextCost,
    SampledCost,
    StepCost,
    VerifyRow,
    median_cost,
)
from dspark.errors import ModelError
from tests.algorithms.toy_costs import (
    BLOCK,
    curve,
    draft_seconds_of,
    linear_cost,
    sampled_cost,
    seconds_of,
)


@given(st.integers(1, 200), st.integers(0, 5))
def test_an_affine_cost_is_looked_up_exactly_between_and_beyond_the_rows(requests: int, width: int):
    cost = linear_cost()
    tokens = requests * (1 + width)
    low = max(n for n in (1, 4, 16, 64) if n <= requests)
    rows = (low, min([n for n in (4, 16, 64) if n >= requests], default=64))
    if all(n <= tokens for n in rows):  # inside both rows
        expected = 20e-3 + 1e-3 * requests + 1e-3 * tokens
        assert seconds_of(cost, requests, tokens) == pytest.approx(expected)


def test_a_staircase_in_every_row_stays_a_staircase_between_rows():
    """Tiles of 16 tokens: with 3 requests, between the rows of 2 and 4, the jump is at 17."""
    rows = tuple(
        VerifyRow(
            num_requests=n,
            curve=curve((n, 16, 17, 32), lambda b, n=n: n + (1.0 if b < 17 else 2.0)),
        )
        for n in (2, 4)
    )
    cost = StepCost(
        fingerprint=Fingerprint.of(),
        block_size=7,
        context=0,
        draft=curve((1,), lambda n: 0.1),
        verify=rows,
    )
    found = [seconds_of(cost, 3, n) for n in (4, 16, 17, 32)]
    assert found == pytest.approx([4.0, 4.0, 5.0, 5.0])


def test_the_drafter_costs_nothing_where_nobody_drafts():
    """UC-142."""
    assert draft_seconds_of(linear_cost(), 0) == 0.0
    assert draft_seconds_of(linear_cost(), 3) == pytest.approx(3.9e-3)


def test_tokens_of_prompts_cost_what_the_first_row_grows_by():
    """They have no logits: 1 ms each beside one request, where drafted tokens take 3."""
    decoding = curve((1, 6), lambda b: 10e-3 + 3e-3 * b)
    first = replace(
        decoding, sizes=(1, 6, 512), seconds=(*decoding.seconds, decoding.seconds[-1] + 506e-3),
        errors=(0.0,) * 3,
    )  # fmt: skip
    row = curve((8, 48), lambda b: 20e-3 + 3e-3 * b)
    cost = replace(
        linear_cost(),
        verify=(VerifyRow(num_requests=1, curve=first), VerifyRow(num_requests=8, curve=row)),
    )
    tokens, context = np.array([8, 24]), np.array([8 * cost.context])
    alone = cost.verify_seconds(8, tokens, context)
    beside = cost.verify_seconds(8, tokens + 100, context, num_prompt_tokens=100)
    np.testing.assert_allclose(alone, 20e-3 + 3e-3 * tokens)
    np.testing.assert_allclose(beside - alone, 0.1)
    assert cost.rows_around(8) == (0, 1)


def test_the_median_of_tables_is_that_of_each_entry():
    tables = [
        replace(
            linear_cost(),
            draft=linear_cost().draft.scaled([times] * len(linear_cost().draft.sizes)),
            verify=tuple(
                replace(row, curve=row.curve.scaled([1.0, times])) for row in linear_cost().verify
            ),
        )
        for times in (1.0, 50.0, 2.0)  # a pause of the machine moves nothing
    ]
    median = median_cost(tables)
    assert draft_seconds_of(median, 4) == pytest.approx(2.0 * draft_seconds_of(tables[0], 4))
    assert seconds_of(median, 4, 4) == pytest.approx(seconds_of(tables[0], 4, 4))
    assert seconds_of(median, 4, 24) == pytest.approx(2.0 * seconds_of(tables[0], 4, 24))


def test_prices_hold_every_part_of_the_step():
    """UC-138: draft, verify, prompt chunks; and plain decoding without the drafter."""
    cost = linear_cost()
    prices = cost.prices(
        num_requests=4,
        num_drafting=3,
        num_prompt_tokens=10,
        num_certain=5,
        context=400,
        most=15,
        is_drafted=False,
    )
    assert prices.plain_seconds == pytest.approx(20e-3 + 4e-3 + 14e-3)
    expected = 20e-3 + 4e-3 + (14 + np.arange(16)) * 1e-3 + 3e-3 + 3 * 0.3e-3
    np.testing.assert_allclose(prices.seconds_B, expected)
    assert prices.num_certain == 5
    drafted = cost.prices(
        num_requests=4,
        num_drafting=3,
        num_prompt_tokens=10,
        num_certain=5,
        context=400,
        most=15,
        is_drafted=True,
    )
    assert drafted.plain_seconds is None


def test_context_is_priced_and_a_longer_one_makes_the_budget_fall():
    """UC-140: attention costs every (token, position) pair, so deep verification costs more."""
    cost = linear_cost(
        per_token=0.5e-3, context_cost=ContextCost(held=1e-6, attended=2e-6, draft_held=1e-6)
    )
    assert seconds_of(cost, 2, 6, context=200) == pytest.approx(20e-3 + 2e-3 + 3e-3)
    more = 1900  # positions of each request beyond the 100 of the profile
    expected = 25e-3 + 1e-6 * more * 2 + 2e-6 * more * 6
    assert seconds_of(cost, 2, 6, context=4000) == pytest.approx(expected)
    assert draft_seconds_of(cost, 2, context=4000) == pytest.approx(3.6e-3 + 1e-6 * 3800)
    survival_RK = np.cumprod(np.full((2, BLOCK), 0.8, dtype=np.float32), axis=1)
    budgets = [
        choose_budget(
            survival_RK,
            cost.prices(
                num_requests=2,
                num_drafting=2,
                num_prompt_tokens=0,
                num_certain=2,
                context=2 * length,
                most=2 * BLOCK,
                is_drafted=False,
            ),
            Limits(caps_R=np.full(2, BLOCK)),
        ).budget
        for length in (100, 4000, 16000, 64000)
    ]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def test_a_context_shorter_than_the_profiles_never_makes_a_step_free():
    cost = linear_cost(context_cost=ContextCost(held=1.0))
    assert seconds_of(cost, 1, 1, context=0) == pytest.approx(0.25 * 22e-3)


def test_another_machine_is_refused_with_what_differs():
    here = Fingerprint.of(target="toy", dtype="bf16", threads=2, torch="2.13")
    cost = linear_cost()
    with pytest.raises(ModelError, match=r"dtype fp32 / bf16, torch unknown / 2\.13\); run"):
        cost.fingerprint.require_same(here)
    cost.fingerprint.require_same(Fingerprint.of(threads=2, dtype="fp32", target="toy"))


@given(st.integers(1, 100), st.integers(0, 5))
def test_what_sampled_requests_cost_more_goes_by_rows(requests: int, width: int) -> None:
    cost = replace(linear_cost(), sampled=sampled_cost(per_row=3e-4, per_request=1e-4))
    rows = requests * (1 + width)
    assert cost.sampled_seconds(requests, np.array([rows]))[0] == pytest.approx(3e-4 * rows)
    found = cost.sampled_draft_seconds(np.array([0, requests]))
    np.testing.assert_allclose(found, [0.0, 1e-4 * requests])


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_sampled_requests_pays_its_share_and_prompts_are_never_drawn(share: float):
    cost = replace(
        linear_cost(context_cost=ContextCost(held=1e-6, attended=2e-7, draft_held=1e-6)),
        sampled=sampled_cost(per_row=3e-4, per_request=1e-4),
    )
    tokens, held = np.array([9 + 30]), np.array([1000])
    greedy = cost.verify_seconds(3, tokens, held)
    mixed = cost.verify_seconds(3, tokens, held, sampled=share, num_prompt_tokens=30)
    np.testing.assert_allclose(mixed - greedy, share * 3e-4 * 9)
    drafting = np.array([0, 3])
    drafts = [cost.draft_seconds(drafting, 300 * drafting, sampled=s) for s in (0.0, share)]
    np.testing.assert_allclose(drafts[1] - drafts[0], [0.0, share * 3e-4])
    one = cost.verify_entry(3, 9)
    assert cost.verify_in_context(one, 3, 9, 1000, sampled=share) == pytest.approx(
        cost.verify_seconds(3, np.array([9]), held, sampled=share)[0]
    )
    one = cost.draft_entry(3)
    assert cost.draft_in_context(one, 3, 900, sampled=share) == pytest.approx(drafts[1][1])


def test_a_table_that_knows_no_sampled_requests_takes_all_for_alike() -> None:
    assert linear_cost().sampled_seconds(4, np.array([4, 8])).tolist() == [0.0, 0.0]
    assert linear_cost().sampled_draft_seconds(np.array([4])).tolist() == [0.0]


@pytest.mark.parametrize("sampled", [None, sampled_cost(per_row=1e-4, per_request=1e-5)])
def test_json_round_trip(sampled: SampledCost | None):
    cost = replace(linear_cost(context_cost=ContextCost(held=1e-6, attended=2e-7)), sampled=sampled)
    text = json.dumps(cost.to_json())
    assert StepCost.from_json(json.loads(text)) == cost


def test_a_table_of_an_older_format_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match="have version 1; run `dspark profile` again"):
        StepCost.from_json(linear_cost().to_json() | {"version": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"sampled": {"draft": None}},
        {"sampled": {"verify": []}},
        {"verify": []},
        {"verify": [{"num_requests": 4}]},
        {"verify": 3},
        {"context_cost": {"unknown": 1.0}},
        {"draft": None},
    ],
)
def test_damaged_tables_are_refused(change):
    with pytest.raises(ModelError):
        StepCost.from_json(linear_cost().to_json() | change)
