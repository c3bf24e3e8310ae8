"""The planner in service: exact, never much slower than plain, and quick to notice faults."""

from dataclasses import replace
from itertools import count, pairwise

import numpy as np
import pytest

from dspark.algorithms.calibration import Calibration
from dspark.algorithms.policies import Adaptive, FixedWidth, Search
from dspark.algorithms.step_cost import StepCost, VerifyRow
from dspark.core import Coupling, SamplingParams
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.planner import FixedPlanner, Outcome, Outlook
from dspark.engine.probes import LOOK, LOSS, MOST_PROBED
from tests.algorithms.toy_costs import curve, linear_cost, sampled_cost
from tests.algorithms.toy_enumeration import exact_output
from tests.engine.toy_service import Service, phrases, plain_rate, steady

MAXIMAL = SamplingParams(coupling=Coupling.MAXIMAL)
# a token costs 1/21 of a plain step, a block a third
QUIET = linear_cost(base=19e-3, per_request=0.0, draft_base=6e-3, draft_per_request=0.5e-3)
# nothing is free any more: tokens cost as much as anchors
BUSY = linear_cost(base=5e-3, per_request=0.0, per_token=5e-3, draft_per_request=2e-3)


# Two requests: a dip, then a gain, on which a search over the whole block wants to look ahead.
WITH_A_DIP = replace(
    QUIET,
    block_size=2,
    draft=curve((1, 2), lambda n: 0.0),
    verify=(
        VerifyRow(
            num_requests=2,
            curve=curve(range(2, 7), {2: 1.0, 3: 1.25, 4: 1.3, 5: 1.55, 6: 1.6}.__getitem__),
        ),
    ),
)


def planner_of(cost: StepCost, search: Search | None = None, **changes: float) -> AdaptivePlanner:
    return AdaptivePlanner(Adaptive(search=search, **changes), block_size=5, cost=cost)


def outlook(max_widths: list[int], *, rounds: int = 1) -> Outlook:
    count = len(max_widths)
    return Outlook(
        slots=range(count),
        rounds=[rounds] * count,
        max_widths=max_widths,
        num_prompt_tokens=0,
        num_certain=count,
        context=100 * count,
    )


def scaled(cost: StepCost, *, draft: float, verify: float) -> StepCost:
    rows = tuple(
        replace(row, curve=row.curve.scaled([verify] * len(row.curve.sizes))) for row in cost.verify
    )
    return replace(cost, draft=cost.draft.scaled([draft] * len(cost.draft.sizes)), verify=rows)


def planned_lengths(search: Search | None, *, share: float, is_probe: bool = False):
    """`plan(confidence_RK)` of a planner that has served two requests for a while."""

    def plan(confidence_RK: np.ndarray) -> list[int]:
        planner = AdaptivePlanner(
            Adaptive(search=search, share=share),
            block_size=2,
            cost=WITH_A_DIP,
            calibration=Calibration.identity(2),
        )
        for slot in range(2):
            planner.begin(slot, MAXIMAL, slot)
        rng = np.random.default_rng(1)
        for step in range(6):
            lengths = [0, 0]
            caps = planner.caps(outlook([2, 2], rounds=step))
            if any(caps):
                logits_RK = rng.normal(1.0, 1.0, (2, 2)).astype(np.float32)
                lengths = list(planner.plan(logits_RK, caps).lengths)
            planner.observe(
                Outcome(
                    verified=lengths,
                    accepted=lengths,
                    num_prompt_tokens=0,
                    draft_seconds=None,
                    verify_seconds=None,
                )
            )
        caps = planner.caps(outlook([2, 2], rounds=6))
        odds_RK = confidence_RK / np.maximum(1.0 - confidence_RK, 1e-6)
        return list(planner.plan(np.log(np.maximum(odds_RK, 1e-6)), caps).lengths)

    return plan


@pytest.mark.parametrize("search", [None, Search.CAUSAL, Search.DELAYED])
@pytest.mark.parametrize("share", [0.02, 0.1])
def test_the_output_distribution_is_the_targets(search: Search | None, share: float) -> None:
    """Every draft of two requests enumerated, with the planner itself in the loop."""
    for salt in range(4):
        output, target = exact_output(planned_lengths(search, share=share), salt=salt)
        np.testing.assert_allclose(output, target, atol=1e-6)


def test_the_enumeration_finds_the_free_search_under_maximal_coupling() -> None:
    errors = []
    for salt in range(4):
        output, target = exact_output(planned_lengths(Search.FREE, share=0.02), salt=salt)
        errors.append(np.abs(output - target).max())
    assert max(errors) > 1e-2


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("cost", [QUIET, BUSY], ids=["quiet", "busy"])
def test_never_slower_than_plain_or_than_any_width(
    cost: StepCost, num_requests: int, chance: float
) -> None:
    """UC-143: measured with noise, after 60 steps of learning."""
    service = Service(planner_of(cost), cost, steady(chance), num_requests=num_requests, noise=0.03)
    service.rate(60)
    found = service.rate(300)
    others = [
        Service(
            FixedPlanner(FixedWidth(width=width)), cost, steady(chance), num_requests=num_requests
        ).rate(300)
        for width in range(6)
    ]
    assert found >= 0.96 * max(others), (found, others)


@pytest.mark.parametrize("params", [MAXIMAL, SamplingParams(temperature=0.0)], ids=["T=1", "T=0"])
@pytest.mark.parametrize("chance", [0.2, 0.3, 0.5])
def test_a_lone_request_takes_what_a_shelf_gives_for_nothing(
    params: SamplingParams, chance: float
) -> None:
    """As on a processor with AVX2: 3 tokens cost what one does, the fourth a quarter more."""
    seconds = {1: 9.9e-3, 2: 9.9e-3, 3: 10.0e-3, 4: 12.4e-3, 5: 13.0e-3, 6: 13.6e-3}
    shelf = replace(
        QUIET,
        draft=curve((1, 2), lambda n: 0.7e-3 + 0.6e-3 * n),
        verify=(VerifyRow(num_requests=1, curve=curve(seconds, seconds.__getitem__)),),
    )
    service = Service(planner_of(shelf), shelf, steady(chance), params=params)
    service.rate(100)
    found = service.rate(1000)
    others = []
    for width in range(4):
        fixed = Service(FixedPlanner(FixedWidth(width=width)), shelf, steady(chance), params=params)
        fixed.rate(100)
        others.append(fixed.rate(1000))
    assert found >= 0.985 * max(others), (found, others)


@pytest.mark.parametrize(("cost", "num_requests"), [(QUIET, 16), (BUSY, 2), (BUSY, 8)])
@pytest.mark.parametrize("chance", [0.2, 0.6])
def test_where_nobody_drafts_the_budget_is_nothing(
    cost: StepCost, num_requests: int, chance: float
) -> None:
    """A choice that came out below plain decoding left an empty tuple: as an index, everybody."""
    planner = planner_of(cost, Search.DELAYED)
    service = Service(planner, cost, steady(chance), num_requests=num_requests, noise=0.03)
    assert service.rate(200) > 0.0


def test_confident_blocks_are_verified_deep_and_doubtful_ones_not() -> None:
    """A mixture beats every fixed width, which must treat both alike."""
    chances = phrases(0.1, 0.95, 0.5)
    found = Service(planner_of(QUIET), QUIET, chances).rate(600)
    others = [
        Service(FixedPlanner(FixedWidth(width=width)), QUIET, chances).rate(600)
        for width in range(6)
    ]
    assert found > 1.03 * max(others)


def test_a_shelf_is_filled_where_the_text_may_depend_on_it() -> None:
    """Up to 8 tokens a pass takes what one takes, beyond them much more (a processor without
    tiles): one price for every token either leaves the shelf or does not fill it."""
    cost = linear_cost(base=8e-3, per_request=0.0, draft_base=1e-3)
    shelf = replace(
        cost,
        verify=tuple(
            VerifyRow(
                num_requests=count,
                curve=curve(range(count, 13), lambda n: 8e-3 + 1.5e-3 * max(n - 8, 0)),
            )
            for count in (1, 2)
        ),
    )
    service = Service(planner_of(shelf), shelf, steady(0.55), num_requests=2, params=MAXIMAL)
    service.rate(100)
    found = service.rate(600)
    fixed = Service(
        FixedPlanner(FixedWidth(width=3)), shelf, steady(0.55), num_requests=2, params=MAXIMAL
    )
    assert found > 0.98 * fixed.rate(600)


def test_requests_that_are_sure_draft_and_the_others_do_not() -> None:
    """At load the drafter runs for those whose tokens survive."""
    asked = count()
    planner = planner_of(BUSY)
    service = Service(
        planner,
        BUSY,
        lambda rng, step: np.full(5, 0.98 if next(asked) % 8 < 2 else 0.05),
        num_requests=8,
    )
    for _ in range(200):
        service.step()
    whole = list(planner.records)[60:]
    late = [record for record in whole if record.num_drafting]
    assert len(whole) - len(late) <= LOOK  # plain steps are looked at
    assert min(record.num_drafting for record in late) == 2
    assert all(record.num_drafting == 2 for record in late if record.why == "drafted")
    assert sum(record.num_drafting - 2 for record in late) < 0.4 * len(late)
    assert all(min(record.lengths[:2]) == 5 for record in late)


def test_without_drafts_the_drafter_is_asked_seldom_and_a_change_is_noticed() -> None:
    """UC-142, UC-144: probes are bounded, and drafting comes back within their interval."""

    def late(rng: np.random.Generator, step: int) -> np.ndarray:
        return np.full(5, 0.05 if step < 500 else 0.95)

    planner = planner_of(QUIET)
    service = Service(planner, QUIET, late)
    service.rate(100)
    before = service.num_drafts
    service.rate(400)
    assert service.num_drafts - before <= 400 // 40
    assert service.num_drafts > before
    service.rate(160)
    assert all(record.num_drafting for record in list(planner.records)[-16:])


def test_a_new_request_is_probed_before_others_as_soon_as_it_can_be_afforded() -> None:
    planner = planner_of(BUSY)
    service = Service(planner, BUSY, steady(0.05), num_requests=20)
    service.rate(200)
    newest = [3, 11]
    for slot in newest:
        planner.begin(slot, service.params, 99)
    for _ in range(300):
        if service.step() and service.planner.records[-1].why == "probe":
            break
    assert not planner._did_draft  # nobody drafts for gain
    planner._take_in()
    assert all(planner._members[slot].drafted_at is not None for slot in newest)
    assert service.planner.records[-1].num_drafting == MOST_PROBED


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
def test_a_drafter_that_is_always_wrong_costs_the_same_share_however_many_requests(
    num_requests: int,
) -> None:
    """It says even odds; requests come and go. Probes are bounded all together."""
    planner = planner_of(BUSY)
    service = Service(
        planner,
        BUSY,
        steady(0.0),
        num_requests=num_requests,
        logits=lambda rng, chances_RK: np.zeros_like(chances_RK),
    )
    turn = 0

    def rate(num_steps: int) -> float:
        nonlocal turn
        tokens, seconds = service.tokens, service.seconds
        for _ in range(num_steps):
            service.step()
            if turn % max(40 // num_requests, 1) == 0:
                planner.begin(turn % num_requests, service.params, turn)
            turn += 1
        return (service.tokens - tokens) / (service.seconds - seconds)

    rate(200)
    assert rate(400) >= (1.0 - 2.0 * LOSS) * plain_rate(BUSY, num_requests)


FAULTS = {
    "table ten times too dear": lambda cost: scaled(cost, draft=10.0, verify=10.0),
    "table ten times too cheap": lambda cost: scaled(cost, draft=0.1, verify=0.1),
    "drafter ten times too cheap": lambda cost: scaled(cost, draft=0.1, verify=1.0),
    "drafter ten times too dear": lambda cost: scaled(cost, draft=10.0, verify=1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
def test_a_wrong_table_is_corrected_while_serving(
    fault: str, num_requests: int, chance: float
) -> None:
    truth = BUSY
    planner = planner_of(FAULTS[fault](truth))
    service = Service(planner, truth, steady(chance), num_requests=num_requests, noise=0.05)
    service.rate(200)
    assert service.rate(300) >= 0.95 * plain_rate(truth, num_requests)


@pytest.mark.parametrize(
    ("num_requests", "per_token", "chance"), [(4, 1.5e-3, 0.55), (8, 2.5e-3, 0.7)]
)
def test_a_table_in_which_only_plain_steps_are_too_dear_is_found_out(
    num_requests: int, per_token: float, chance: float
) -> None:
    """Drafting seems to gain a tenth and loses as much; steps that draft cannot show it."""
    cost = linear_cost(base=10e-3, per_request=0.0, draft_base=2e-3)
    sizes = [num_requests * k for k in range(1, 7)]
    rows = VerifyRow(num_requests=num_requests, curve=curve(sizes, lambda b: 10e-3 + per_token * b))
    truth = replace(cost, verify=(rows,))
    dear = replace(rows, curve=rows.curve.scaled([1.25, *[1.0] * 5]))
    planner = planner_of(replace(cost, verify=(dear,)))
    service = Service(planner, truth, steady(chance), num_requests=num_requests, noise=0.05)
    service.rate(200)
    assert service.num_drafts > 10
    assert service.rate(400) >= 0.98 * plain_rate(truth, num_requests)


def test_a_probe_is_charged_what_it_took() -> None:
    """The first draft behind plain steps costs more than a table of steady steps knows."""

    def num_probes(factor: float) -> int:
        planner = planner_of(BUSY)
        service = Service(planner, BUSY, steady(0.1), num_requests=8)
        decide = planner.caps

        def caps(outlook: Outlook) -> list[int]:
            found = decide(outlook)
            service.slow = factor if planner._held.probed else 1.0
            return found

        planner.caps = caps
        service.rate(1000)
        return service.num_drafts

    assert num_probes(1.3) < 0.7 * num_probes(1.0)


def test_what_a_probed_drafter_has_to_make_up_for_is_charged_and_no_price_of_a_block() -> None:
    def probes(catch_up: float) -> tuple[int, float]:
        planner = planner_of(BUSY)
        service = Service(planner, BUSY, steady(0.1), num_requests=8, catch_up=catch_up)
        service.rate(1500)
        return service.num_drafts, float(planner.costs.seconds(8, 0, 800).draft_N[8])

    (many, usual), (few, dear) = probes(0.0), probes(0.04)
    assert few < 0.7 * many
    assert dear == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("cost", [QUIET, BUSY], ids=["quiet", "busy"])
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_a_drafter_whose_confidences_lie_costs_little(
    cost: StepCost, num_requests: int, chance: float
) -> None:
    """Random and far too high; 0.0 is a drafter that is always wrong."""
    service = Service(
        planner_of(cost),
        cost,
        steady(chance),
        num_requests=num_requests,
        logits=lambda rng, chances_RK: rng.normal(2.0, 1.0, chances_RK.shape),
    )
    service.rate(200)
    assert service.rate(300) >= 0.95 * plain_rate(cost, num_requests)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_machine_that_turns_slow_half_way(num_requests: int) -> None:
    service = Service(planner_of(QUIET), QUIET, steady(0.3), num_requests=num_requests, noise=0.05)
    service.rate(200)
    service.slow = 3.0
    service.rate(200)
    assert service.rate(300) >= 0.95 * plain_rate(QUIET, num_requests) / 3.0
    errors = [
        abs(np.log(record.seconds / record.predicted_seconds))
        for record in list(service.planner.records)[-100:]
    ]
    assert np.median(errors) < 0.1


def test_a_request_that_comes_does_as_most_until_the_next_decision() -> None:
    """A decision is patched, not made anew: users of short answers come every few steps."""
    planner = planner_of(QUIET)
    service = Service(planner, QUIET, steady(0.8), num_requests=8)
    service.rate(100)
    held = planner._held
    assert held is not None
    while held.steps_left < 4:
        service.step()
        held = planner._held
        assert held is not None
    planner.begin(3, service.params, 99)
    service.step()
    assert planner._held is not held
    assert planner._held is not None
    assert planner._held.steps_left == held.steps_left - 1
    assert planner.records[-1].num_drafting == 8
    assert planner.records[-1].predicted_seconds is not None


def test_plain_decoding_goes_on_undisturbed_where_many_come_and_go() -> None:
    """At 64 users of short answers somebody comes in nearly every step."""
    planner = planner_of(BUSY)
    service = Service(planner, BUSY, steady(0.1), num_requests=64)
    service.rate(100)
    while planner._held is None or planner._held.probed or planner._held.steps_left < 4:
        service.step()
    left = planner._held.steps_left
    for slot in (3, 60):
        planner.begin(slot, service.params, 99)
        service.step()
    assert planner._held.steps_left == left - 2
    assert planner.records[-1].why == "plain"


def test_sampled_requests_are_priced_as_such() -> None:
    """Drafts that pay for greedy requests do not where judging a token costs as much again."""
    cost = replace(QUIET, sampled=sampled_cost(per_row=20e-3))
    drafts = []
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)):
        planner = planner_of(cost)
        service = Service(planner, cost, steady(0.6), num_requests=4, params=params)
        service.rate(200)
        drafts.append(service.num_drafts)
        assert planner.records[-1].predicted_seconds is not None
    assert drafts[0] > 150
    assert drafts[1] < 50


def test_a_floor_bounds_what_others_may_cost() -> None:
    """A request that insists on its speed gets it, where any budget gives it."""
    floor = 0.9 / 26e-3  # of its plain speed in a step of four
    cost = linear_cost(base=10e-3, per_token=4e-3, per_request=0.0, draft_base=0.1e-3)
    slow = replace(SamplingParams(seed=3), min_tokens_per_s=floor)
    planner = planner_of(cost)
    service = Service(planner, cost, steady(0.9), num_requests=4)
    planner.begin(0, slow, 0)
    service.rate(50)
    for record in list(planner.records)[-20:]:
        assert record.predicted_seconds is not None
        assert record.predicted_seconds < 5.0 / floor


def test_rounds_that_explore_are_verified_in_full_and_few() -> None:
    planner = planner_of(QUIET, share=0.1)
    service = Service(planner, QUIET, steady(0.5), num_requests=2)
    lengths = [service.step() for _ in range(300)]
    explored = [r for r in planner.records if r.why == "explored"]
    assert 0 < len(explored) < 0.35 * len(lengths)
    assert all(max(record.lengths) == 5 for record in explored)


def test_a_block_without_confidences_is_planned_by_what_its_positions_showed() -> None:
    """A drafter without a confidence head: chances by position are learnt from outcomes."""
    planner = planner_of(QUIET, Search.FREE)
    service = Service(planner, QUIET, steady(0.15))
    said = service._said
    service._said = lambda chances_RK: None  # type: ignore[method-assign,assignment,return-value]
    assert said is not None
    service.rate(1200)
    assert service.rate(300) >= 0.95 * plain_rate(QUIET, 1)


@pytest.mark.parametrize("cost", [QUIET, BUSY], ids=["quiet", "busy"])
def test_a_steady_drafter_is_not_switched_on_and_off(cost: StepCost) -> None:
    """UC-144: chances of one half, near where drafting begins to pay, for a thousand steps."""
    planner = planner_of(cost)
    service = Service(planner, cost, steady(0.5), num_requests=2, noise=0.03)
    whys: list[str] = []
    for _ in range(1000):
        service.step()
        whys.append(planner.records[-1].why)
    chosen = [why for why in whys[60:] if why in ("drafted", "plain")]  # no probe is a choice
    assert sum(a != b for a, b in pairwise(chosen)) < 50
