"""A whole sweep on a toy engine whose clock is a formula: order, budget of time, crash, report."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.benchmarks.environment import Environment
from dspark.benchmarks.load.config import LoadConfig, LoadKind, Unit
from dspark.benchmarks.load.report import LoadReport, runs_of
from dspark.benchmarks.load.results import LoadResults
from dspark.benchmarks.load.sweep import Sweep, _Beside
from dspark.benchmarks.load.tally import Measured
from dspark.errors import InputError
from dspark.models.target import Target
from tests.toy_load import FakeClock, ToyEngines, bigram_target, staircase, tasks

CONFIG = LoadConfig(
    policies=("auto", "none", "mtp1", "fixed:4"),
    concurrency=(1, 6),
    rates=(2.0,),
    temperatures=(0.0,),
    repeats=1,
    unit_s=0.6,
    max_new_tokens=24,
    max_step_tokens=64,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return bigram_target()


def sweep(target: Target, path: Path, *, config: LoadConfig = CONFIG, wall: FakeClock) -> Sweep:
    engines = ToyEngines(target)
    return Sweep(
        engines=engines,
        tasks=tasks(),
        config=config,
        results=LoadResults(path, settings={"seed": config.seed}),
        clock=engines.clock,
        wall=wall,
    )


def run(target: Target, path: Path, **options: object) -> Sweep:
    found = sweep(target, path, wall=FakeClock(), **options)  # type: ignore[arg-type]
    assert found.run()
    return found


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return run(target, tmp_path_factory.mktemp("load") / "r.jsonl")


def report_of(found: Sweep) -> LoadReport:
    return LoadReport(
        target="toy",
        dtype="fp32",
        quantization=None,
        kv_cache_dtype="fp32",
        block_size=4,
        num_prompts=len(found.tasks),
        max_new_tokens=found.config.max_new_tokens,
        is_complete=True,
        runs=runs_of(
            found.results.units,
            temperatures=found.config.temperatures,
            policies=found.config.policies,
            loads=found.config.loads,
        ),
        environment=Environment.here(),
    )


def test_every_unit_is_measured_and_the_json_has_the_agreed_keys(whole: Sweep) -> None:
    assert set(whole.results.units) == set(CONFIG.units())
    line = json.loads(json.dumps(report_of(whole).to_json()))
    for policy in CONFIG.policies:
        for load in ("1", "6"):
            assert line["policies"][policy][load].keys() >= {
                "tokens_per_s",
                "per_user_tokens_per_s",
                "step_ms",
                "tau",
                "budget_per_request",
            }
        assert line["open_loads"][policy]["2"]["ttft_ms"].keys() == {"p50", "p99"}
    assert line["geometric_mean"].keys() == set(CONFIG.policies)
    assert line["against_mtp1"].keys() >= {
        "per_user_gain_at_matched_throughput",
        "throughput_gain_at_middle_speed",
    }
    assert line["temperatures"]["0"]["policies"] == line["policies"]


def test_the_figures_are_those_of_the_formula(whole: Sweep) -> None:
    """Plain decoding of one user: 10.1 ms, one shelf of 4 ms, prompts aside; and of six users."""
    policies = report_of(whole).runs[0].policies
    plain = policies["none"]
    assert plain["1"].step_ms == pytest.approx(14.1)
    assert plain["1"].per_user_tokens_per_s == pytest.approx(1 / 14.1e-3, rel=0.03)
    assert plain["1"].tau == 1.0
    assert plain["1"].budget_per_request == 0.0
    assert plain["6"].tokens_per_s == pytest.approx(6 / 14.6e-3, rel=0.15)
    assert 3 < (policies["fixed:4"]["1"].budget_per_request or 0.0) <= 4  # less at an end
    assert (policies["fixed:4"]["1"].tau or 0.0) > (policies["mtp1"]["1"].tau or 0.0) > 1.3


def test_every_closed_unit_of_a_load_does_the_same_work(whole: Sweep) -> None:
    for load in CONFIG.loads:
        if load.kind is LoadKind.CLOSED:
            work, found = int(whole.results.work[load]), whole.results.units.items()
            assert work % CONFIG.max_new_tokens == 0
            for unit, measured in found:
                if unit.load == load:
                    assert abs(measured.tokens - work) < load.level * 5
    alone = {m.prompt_tokens for u, m in whole.results.units.items() if u.load.name == "1"}
    assert len(alone) == 1


def test_a_unit_of_few_users_has_as_many_answers_of_each_domain(
    target: Target, tmp_path: Path
) -> None:
    """However little time there is: a policy's gain depends on the text, and one answer says
    little of it. With more users rounds hold many answers anyway."""
    config = replace(CONFIG, policies=("none", "fixed:4"), concurrency=(1, 2, 6), rates=())
    for unit_s, answers in ((0.01, (3, 3, 4)), (1.2, (9, 15, 19))):
        path = tmp_path / f"{unit_s}.jsonl"
        found = run(target, path, config=replace(config, unit_s=unit_s)).results
        assert [found.work[load] / 24 for load in config.loads] == list(answers)
        for unit, measured in found.units.items():
            if unit.load.has_few:
                rounds = [counts.rounds for counts in measured.domains.values()]
                assert len(rounds) == 3
                assert min(rounds) > 0.3 * max(rounds)


def test_a_machine_that_slows_down_hits_all_policies_of_a_round_alike(
    target: Target, tmp_path: Path
) -> None:
    """The machine turns three times as slow while it is measured; ratios stay what they are."""
    config = replace(
        CONFIG, policies=("auto", "none", "fixed:4"), concurrency=(3,), rates=(), repeats=5
    )
    found = []
    for drift in (0.0, 0.2):
        engines = ToyEngines(target)
        clock = engines.clock

        def slower(*sizes: int, clock: FakeClock = clock, drift: float = drift) -> float:
            return staircase(*sizes) * (1.0 + drift * clock.now)

        engines.seconds = slower
        made = Sweep(
            engines=engines,
            tasks=tasks(),
            config=config,
            results=LoadResults(tmp_path / f"{drift}.jsonl", settings={}),
            clock=clock,
            wall=FakeClock(),
        )
        assert made.run()
        found.append(report_of(made).runs[0])
    even, drifting = found
    rates = drifting.policies["none"]["3"]
    assert rates.tokens_per_s_max > 1.5 * rates.tokens_per_s_min
    for policy in ("none", "fixed:4"):
        ours, theirs = (
            {**(run.auto_over_plain or {}), "best": (run.auto_over_best or {})["3"]}
            for run in found
        )
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert theirs[name].ratio == pytest.approx(ours[name].ratio, rel=0.1), policy
    assert drifting.auto_over_best is not None
    versus = drifting.auto_over_best["3"]
    assert versus.repeats == 5
    assert versus.quartiles is not None
    assert versus.quartiles[0] <= versus.ratio <= versus.quartiles[1]
    assert even.best_single == drifting.best_single


def test_a_crash_loses_one_unit(target: Target, tmp_path: Path) -> None:
    config = replace(
        CONFIG, policies=("none", "mtp1"), concurrency=(1, 2), rates=(), repeats=2, unit_s=0.3
    )
    whole = run(target, tmp_path / "whole.jsonl", config=config)
    path, seen = tmp_path / "r.jsonl", []

    def die(unit: Unit, _measured: Measured, done: int) -> None:
        seen.append(unit)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(target, path, config=config, wall=FakeClock()).run(on_unit=die)
    with path.open("ab") as stream:
        stream.write(b'{"unit": {"temper')  # a kill in the middle of a line
    rest: list[Unit] = []
    resumed = sweep(target, path, config=config, wall=FakeClock())
    assert resumed.run(on_unit=lambda unit, _measured, _done: rest.append(unit))
    assert [*seen, *rest] == list(config.units())
    assert resumed.results.work == whole.results.work
    assert [a.token_ids for a in resumed.results.answers] == [
        a.token_ids for a in whole.results.answers
    ]
    for unit in config.units():
        here, there = (found.results.units[unit].tokens for found in (resumed, whole))
        assert here == pytest.approx(there, abs=unit.load.level * 5)


def test_time_that_is_up_ends_the_run_between_two_units(target: Target, tmp_path: Path) -> None:
    config = replace(CONFIG, budget_minutes=0.5)
    wall = FakeClock()
    found = sweep(target, tmp_path / "r.jsonl", config=config, wall=wall)

    def pass_time(*_: object) -> None:
        wall.now += 12.5

    assert not found.run(on_unit=pass_time)
    assert len(found.results.units) == 3
    assert [load.level for _, load in found.results.profiles] == [1.0]  # of a round that was cut
    assert found.run()  # the same command goes on
    assert set(found.results.units) == set(config.units())
    # units are shortened so that all of them would have fitted: 12, 4 of them twice as long
    assert (config.num_units, config.num_lengths) == (12, 16.0)
    assert found.results.work[CONFIG.loads[-1]] == pytest.approx(8 * 0.6)
    shorter = replace(config, budget_minutes=0.1)
    again = sweep(target, tmp_path / "s.jsonl", config=shorter, wall=FakeClock())
    again.run()
    assert again.results.work[CONFIG.loads[-1]] == pytest.approx(8 * 0.52 * 6 / 16)


def test_every_load_gets_its_share_of_the_minutes_in_whole_rounds(
    target: Target, tmp_path: Path
) -> None:
    """That of one user twice as much as the other."""
    config = replace(
        CONFIG, policies=("none", "mtp1"), rates=(), repeats=5, budget_minutes=1.5, unit_s=0.2
    )
    wall = FakeClock()
    found = sweep(target, tmp_path / "r.jsonl", config=config, wall=wall)

    def pass_time(*_: object) -> None:
        wall.now += 8.0

    assert not found.run(on_unit=pass_time)
    counts = Counter((u.load.name, u.policy) for u in found.results.units)
    rounds = {"1": 4, "6": 2}
    assert counts == {(load, p): n for load, n in rounds.items() for p in config.policies}


def test_results_of_other_settings_are_refused(target: Target, tmp_path: Path) -> None:
    results = LoadResults(tmp_path / "r.jsonl", settings={"seed": 1})
    results.add_work(CONFIG.loads[0], 96.0)  # without any result the file would begin anew
    with pytest.raises(InputError, match="seed 1, and now it is 0"):
        sweep(target, tmp_path / "r.jsonl", wall=FakeClock())
    (tmp_path / "s.jsonl").write_text('{"settings": {}}\n{"else": 1}\n')
    with pytest.raises(InputError, match="no result of a load sweep"):
        LoadResults(tmp_path / "s.jsonl", settings={})


def test_a_profile_beside_a_load_takes_its_share_of_the_time_and_no_more() -> None:
    """A piece of it takes 2 s, a step of the load 4 s: it begins at once, and comes with every
    third or fourth step then, since 15 s for a hundred are its share."""
    wall, taken, ended = FakeClock(), list[int](), list[float]()

    class Profile:
        def take(self) -> None:
            wall.now += 2.0
            taken.append(len(ended))

        def table(self) -> None:
            return None

    beside = _Beside(Profile(), wall)
    while len(ended) < 20:
        beside(4.0)
        ended.append(4.0)
    assert taken == [0, 3, 6, 9, 13, 16, 19]


def test_every_round_of_a_closed_load_has_a_profile_and_an_open_one_none(whole: Sweep) -> None:
    closed = {(0.0, load) for load in CONFIG.loads if load.kind is LoadKind.CLOSED}
    assert set(whole.results.profiles) == closed
    assert all(len(found) == CONFIG.repeats for found in whole.results.profiles.values())
