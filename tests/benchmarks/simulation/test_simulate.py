"""Policies on machines that are tables: hand-computed speeds, replicas, traces, foreign tables."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.foreign_costs import read_cost
from dspark.algorithms.step_cost import SampledCost, VerifyRow
from dspark.benchmarks.simulation.arrivals import TracedRequest
from dspark.benchmarks.simulation.recording import RecordedAnswer, Recording
from dspark.benchmarks.simulation.simulate import Machine, SimulationConfig, simulate
from dspark.errors import InputError
from tests.toy_load import profile

K = 4


def recording(chance: Callable[[int], float], *, num_answers: int = 40) -> Recording:
    """Answers of 60 tokens whose drafts are right with a chance by answer; confidences say so."""
    rng = np.random.default_rng(0)
    answers = []
    for index in range(num_answers):
        right_JK = rng.uniform(size=(40, K)) < chance(index)
        accepted = np.cumprod(right_JK, axis=1).sum(1)
        starts = 1 + np.concatenate([[0], np.cumsum(accepted + 1)[:-1]])
        logit = np.log(chance(index) / (1.0 - chance(index)))
        answers.append(
            RecordedAnswer(
                domain=("easy", "hard")[index % 2],
                num_prompt_tokens=10,
                num_tokens=60,
                is_stopped=True,
                starts_J=starts.tolist(),
                accepted_J=accepted.tolist(),
                logits_JK=np.full((40, K), logit, dtype=np.float32),
                copied_J=[False] * 40,
            )
        )
    return Recording(answers=answers, block_size=K, temperature=0.0)


def config(**changes: object) -> SimulationConfig:
    values = {
        "policies": ("auto", "none", "mtp1", "fixed:4"),
        "requests": 60,
        "requests_per_user": 60,
        "seed": 1,
    }
    return SimulationConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_one_user_gets_what_the_hand_computes() -> None:
    """14.1 ms a plain step; a drafting one 2.1 ms more, which every token is right to pay."""
    machine = Machine(cost=profile(), recording=recording(lambda _: 0.999))
    found = simulate(machine, config=config(concurrency=(1,))).policies
    assert found["none"]["1"].per_user_tokens_per_s == pytest.approx(1 / 14.1e-3, rel=0.01)
    assert found["fixed:4"]["1"].per_user_tokens_per_s == pytest.approx(5 / 16.2e-3, rel=0.05)
    assert found["mtp1"]["1"].tau == pytest.approx(2.0, rel=0.03)
    assert found["auto"]["1"].tokens_per_s >= 0.98 * found["fixed:4"]["1"].tokens_per_s


def test_copies_cost_no_drafter() -> None:
    """A drafting step takes 2.1 ms more than a plain one of as many tokens."""
    rounds = recording(lambda _: 0.999)
    copies = [replace(answer, copied_J=[True] * 40) for answer in rounds.answers]
    found = [
        simulate(
            Machine(cost=profile(), recording=replace(rounds, answers=answers)),
            config=config(concurrency=(1,)),
        ).policies
        for answers in (rounds.answers, copies)
    ]
    for policy in ("fixed:4", "auto"):
        seconds = [1 / policies[policy]["1"].per_user_tokens_per_s for policies in found]
        draft_s = profile().draft_seconds(np.array([1]), np.array([100]))[0]
        assert 5 * (seconds[0] - seconds[1]) == pytest.approx(draft_s, rel=0.1), policy


def test_sampled_requests_take_what_the_table_says_of_them() -> None:
    """1 ms more for each row of logits, none for those of prompts."""
    sampled = SampledCost(
        draft=CostCurve.free(),
        verify=(
            VerifyRow(
                num_requests=1,
                curve=CostCurve(sizes=(0, 100), seconds=(0.0, 0.1), errors=(0.0, 0.0)),
            ),
        ),
    )
    rounds = replace(recording(lambda _: 0.999), temperature=1.0)
    machine = Machine(cost=replace(profile(), sampled=sampled), recording=rounds)
    found = simulate(machine, config=config(concurrency=(1,))).policies
    assert found["none"]["1"].per_user_tokens_per_s == pytest.approx(1 / 15.1e-3, rel=0.01)
    assert found["fixed:4"]["1"].per_user_tokens_per_s == pytest.approx(5 / 21.2e-3, rel=0.05)


def test_the_scheduler_stays_with_the_best_policy_at_every_load() -> None:
    """UC-143: a drafter that is right half of the time pays alone and costs in a crowd."""
    machine = Machine(cost=profile(), recording=recording(lambda i: (0.85, 0.4)[i % 2]))
    report = simulate(machine, config=config(concurrency=(1, 4, 32), requests=100))
    for load in ("1", "4", "32"):
        rates = {name: points[load].tokens_per_s for name, points in report.policies.items()}
        best = max(rate for name, rate in rates.items() if name != "auto")
        assert rates["auto"] >= 0.96 * best, (load, rates)
    budgets = [report.policies["auto"][load].budget_per_request or 0.0 for load in ("1", "32")]
    assert budgets[0] > budgets[1]  # less where more is going on
    drafted = [p.drafting_share for p in report.policies["none"].values()]
    assert drafted == [0.0] * 3


def test_a_drafter_that_is_always_wrong_costs_next_to_nothing() -> None:
    wrong = recording(lambda _: 0.5)
    answers = [replace(a, accepted_J=[0] * 40, starts_J=list(range(1, 41))) for a in wrong.answers]
    machine = Machine(cost=profile(), recording=replace(wrong, answers=answers))
    found = simulate(
        machine, config=config(concurrency=(2,), requests=200, requests_per_user=100)
    ).policies
    assert found["auto"]["2"].tokens_per_s >= 0.95 * found["none"]["2"].tokens_per_s


def test_two_replicas_serve_twice_the_users_alike() -> None:
    machine = Machine(cost=profile(), recording=recording(lambda _: 0.6))
    one = simulate(machine, config=config(policies=("fixed:4",), concurrency=(4,)))
    two = simulate(
        machine, config=config(policies=("fixed:4",), concurrency=(8,), replicas=2, requests=120)
    )
    alone, both = one.policies["fixed:4"]["4"], two.policies["fixed:4"]["8"]
    assert both.tokens_per_s == pytest.approx(2 * alone.tokens_per_s, rel=0.05)
    assert both.per_user_tokens_per_s == pytest.approx(alone.per_user_tokens_per_s, rel=0.05)
    assert both.in_flight == pytest.approx(2 * alone.in_flight, rel=0.05)


def test_an_open_load_waits_longer_the_more_comes() -> None:
    machine = Machine(cost=profile(), recording=recording(lambda _: 0.6))
    report = simulate(
        machine,
        config=config(policies=("none",), concurrency=(), rates=(0.5, 30.0), max_requests=8),
    )
    slow, fast = report.open_loads["none"]["0.5"], report.open_loads["none"]["30"]
    assert slow.ttft_ms is not None
    assert fast.ttft_ms is not None
    assert fast.ttft_ms > 10 * slow.ttft_ms
    assert slow.tokens_per_s == pytest.approx(0.5 * 60, rel=0.4)


def test_a_trace_keeps_its_own_lengths() -> None:
    machine = Machine(cost=profile(), recording=recording(lambda _: 0.6))
    trace = [
        TracedRequest(arrival_s=0.1 * n, num_prompt_tokens=30, num_answer_tokens=100)
        for n in range(5)
    ]
    found = simulate(
        machine, config=config(policies=("none",), concurrency=(), rates=()), trace=trace
    ).trace["none"]
    assert found.tau == 1.0
    # five answers of 100 tokens, the first one alone for a tenth of a second
    assert found.tokens_per_s == pytest.approx(5 * 100 / (0.4 + 100 * 14.5e-3), rel=0.1)


@pytest.mark.parametrize("crowd", [2, 4, 8, 16])
def test_load_that_swings_about_a_switch_point_does_not_collapse(crowd: int) -> None:
    """UC-141: one request, then a crowd, then one, as often as answers take to end."""
    machine = Machine(cost=profile(), recording=recording(lambda _: 0.6))
    trace = [
        TracedRequest(arrival_s=1.2 * swing, num_prompt_tokens=10, num_answer_tokens=60)
        for swing in range(12)
        for _ in range(1 if swing % 2 else crowd)
    ]
    found = simulate(
        machine,
        config=config(
            policies=("auto", "none", "mtp1", "fixed:2", "fixed:4"), concurrency=(), rates=()
        ),
        trace=trace,
    ).trace
    speeds = {name: point.per_user_tokens_per_s for name, point in found.items()}
    best = max(speed for name, speed in speeds.items() if name != "auto")
    assert speeds["auto"] >= 0.9 * best, speeds


def test_tables_of_other_engines_are_simulated() -> None:
    """A flat pass over many tokens on a large machine: whole blocks pay for everybody."""
    tables = (
        {"draft_curve": [[1, 0.5], [64, 0.6]], "verify_curve": [[1, 8.0], [64, 8.4], [512, 20.0]],
         "cudagraph_limit": 64},
        {"sample_batch_tokens": [1, 64, 128], "sample_steps_per_sec": [110.0, 100.0, 60.0],
         "max_batch_tokens": 256},
        {"bias_seconds": 0.008, "bs_probes": [1, 64], "alpha_seconds": [1e-4, 5e-4],
         "m_probes": [1, 512], "theta_seconds": [1e-5, 8e-3]},
    )  # fmt: skip
    for table in tables:
        cost = read_cost(table, block_size=K)
        machine = Machine(cost=cost, recording=recording(lambda _: 0.8))
        found = simulate(machine, config=config(concurrency=(4,))).policies
        assert found["auto"]["4"].tokens_per_s > 2 * found["none"]["4"].tokens_per_s
        assert found["auto"]["4"].tokens_per_s >= 0.97 * found["fixed:4"]["4"].tokens_per_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 2, "concurrency": (1,)}, "replicas need a user each"),
        ({"requests": 0}, "at least 1"),
        ({"rates": (0.0,)}, "above 0"),
        ({"policies": ("best",)}, "best"),
    ],
)
def test_impossible_simulations_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**changes)
