"""What a report says in words, and its pictures, on made-up figures."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from dspark.benchmarks.environment import Environment
from dspark.benchmarks.load.answers import answers, claims
from dspark.benchmarks.load.config import Load, LoadKind, Unit
from dspark.benchmarks.load.plots import save_load_plots
from dspark.benchmarks.load.report import LoadReport, LoadRun, runs_of
from dspark.benchmarks.load.tables import print_load
from dspark.benchmarks.load.tally import Counts, Measured

USERS = (1, 4)


def measured(rate: float, users: int, *, planned: int = 0, wait: float | None = None) -> Measured:
    rounds = 100 * users
    return Measured(
        seconds=10.0,
        num_steps=100,
        step_s=0.1,
        tokens=int(10 * rate),
        prompt_tokens=0,
        decoding_s=10.0 * users,
        domains={
            "math": Counts(
                rounds=rounds, drafting=rounds, offered=3 * rounds, planned=planned * rounds,
                accepted=0, committed=int(5 * rate),
            ),
            "chat": Counts(rounds=rounds, committed=int(5 * rate)),
        },
        ttft_s=[] if wait is None else [wait, 3 * wait],
    )  # fmt: skip


def units(rates: dict[str, tuple[float, float]]) -> dict[Unit, Measured]:
    found = {}
    for policy, by_users in rates.items():
        for users, rate in zip(USERS, by_users, strict=True):
            for repeat in range(3):
                load = Load(kind=LoadKind.CLOSED, level=users)
                unit = Unit(temperature=1.0, load=load, policy=policy, repeat=repeat)
                scale = 1.0 + 0.1 * repeat  # a machine that gets faster, for all alike
                planned = {"auto": 3 // users, "none": 0}.get(policy, 1)
                found[unit] = measured(scale * rate, users, planned=planned)
    return found


RATES = {"auto": (60.0, 100.0), "none": (40.0, 100.0), "mtp1": (50.0, 80.0)}


def run_of(rates: dict[str, tuple[float, float]] = RATES) -> LoadRun:
    loads = [Load(kind=LoadKind.CLOSED, level=users) for users in USERS]
    (found,) = runs_of(units(rates), temperatures=[1.0], policies=list(rates), loads=loads)
    return found


def test_ratios_compare_the_same_repeats() -> None:
    """The machine sped up by a fifth in between: no ratio may show it."""
    run = run_of()
    assert run.auto_over_best is not None
    assert run.auto_over_best["1"].policy == "mtp1"
    assert run.auto_over_best["1"].ratio == pytest.approx(1.2)
    assert run.auto_over_best["1"].interval is not None
    assert run.auto_over_best["1"].interval.low == pytest.approx(1.2, rel=1e-3)
    assert run.auto_over_best["4"].policy == "none"
    assert run.auto_over_plain is not None
    assert run.auto_over_plain["1"].ratio == pytest.approx(1.5)
    assert run.best_single in ("none", "mtp1")
    assert run.auto_over_best_single == pytest.approx((6000 / 4000) ** 0.5, rel=1e-3)
    point = run.policies["auto"]["1"]
    assert point.tokens_per_s == pytest.approx(66.0)  # the median repeat
    assert (point.tokens_per_s_min, point.tokens_per_s_max) == pytest.approx((60.0, 72.0))
    assert point.budget_by_domain == {"math": 3.0, "chat": 0.0}


def test_the_four_questions_come_first_and_have_figures() -> None:
    speed, level, total, budget = answers(run_of())
    assert "1 user 66.0 (x1.50 plain)" in speed
    assert "4 users 27.5 (x1.00 plain)" in speed
    assert "60 tokens/s each up to 1 user (plain: none)" in level
    assert "20 tokens/s each up to 4 users (plain: 4)" in level
    assert "4 users 110" in total
    assert "1 user 1.50 (50% drafted), 4 users 0.00" in budget


def test_the_claims_say_what_holds_and_what_does_not() -> None:
    text = "\n".join(claims(run_of()))
    assert "1: x1.200 [1.200, 1.200] (mtp1), 4: x1.000" in text
    assert "against mtp1: +" in text
    assert "budget by domain: math" in text
    assert "slower" not in text
    slower = "\n".join(claims(run_of({**RATES, "auto": (60.0, 90.0)})))
    assert "auto is slower than plain decoding with 4 users." in slower


def test_a_run_without_the_scheduler_is_reported_without_claims() -> None:
    run = run_of({"none": (40.0, 100.0)})
    assert list(claims(run)) == []
    assert answers(run)[0].startswith("How fast does one user's text come? none")


def test_the_report_is_printed_and_drawn(tmp_path: Path) -> None:
    load = Load(kind=LoadKind.OPEN, level=2.5)
    unit = Unit(temperature=1.0, load=load, policy="none", repeat=0)
    found = {**units(RATES), unit: measured(30.0, 2, wait=0.2)}
    loads = [*(Load(kind=LoadKind.CLOSED, level=users) for users in USERS), load]
    report = LoadReport(
        target="toy",
        dtype="fp32",
        quantization=None,
        kv_cache_dtype="fp32",
        block_size=3,
        num_prompts=6,
        max_new_tokens=8,
        is_complete=False,
        runs=runs_of(
            found,
            temperatures=[1.0, 0.0],
            policies=list(RATES),
            loads=loads,
            predict=lambda _t, _p, load: 50.0 if load.kind is LoadKind.CLOSED else None,
        ),
        environment=Environment.here(),
    )
    console = Console(record=True, width=140, file=io.StringIO())
    print_load(console, report)
    text = console.export_text()
    assert text.index("How fast") < text.index("foretold") < text.index("requests/s")
    assert "200/" in text.replace(" ", "") or "ttft" in text
    assert "Time was up" in text
    pytest.importorskip("matplotlib")
    for path in save_load_plots(report, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")
