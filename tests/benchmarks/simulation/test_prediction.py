"""The simulator against a real engine whose clock is a formula: profile and rounds alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.load.config import LoadConfig
from dspark.benchmarks.load.report import LoadRun, runs_of
from dspark.benchmarks.load.results import LoadResults
from dspark.benchmarks.load.sweep import Sweep
from dspark.benchmarks.simulation.prediction import SweepPrediction
from dspark.benchmarks.simulation.recording import Recording
from dspark.benchmarks.simulation.simulate import Machine
from tests.toy_load import FakeClock, ToyEngines, bigram_target, profile, staircase, tasks

CONFIG = LoadConfig(
    policies=("auto", "none", "mtp1", "fixed:4", "threshold:0.5"),
    concurrency=(1, 8),
    temperatures=(0.0,),
    repeats=1,
    unit_s=2.5,
    max_new_tokens=24,
    max_step_tokens=64,
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    path: Path = tmp_path_factory.mktemp("load") / "r.jsonl"
    engines = ToyEngines(bigram_target())
    found = Sweep(
        engines=engines,
        tasks=tasks(12),
        config=CONFIG,
        results=LoadResults(path, settings={}),
        clock=engines.clock,
        wall=FakeClock(),
    )
    assert found.run()
    return found


def prediction(sweep: Sweep, cost: StepCost) -> SweepPrediction:
    """Of a machine that was profiled so, from what the sweep recorded before its units."""
    recording = Recording.of(answer.record for answer in sweep.results.answers)
    return SweepPrediction(
        machines={0.0: Machine(cost=cost, recording=recording)},
        config=CONFIG,
        work=sweep.results.work,
    )


def run_of(sweep: Sweep, predict: SweepPrediction, live: SweepPrediction | None = None) -> LoadRun:
    """The sweep's only run, beside what was foretold of it."""
    (run,) = runs_of(
        sweep.results.units,
        temperatures=CONFIG.temperatures,
        policies=CONFIG.policies,
        loads=CONFIG.loads,
        predict=predict,
        predict_live=live,
    )
    return run


def test_throughput_is_foretold_within_ten_percent_at_every_point(sweep: Sweep) -> None:
    """UC-138: every part of a step has a term."""
    predict = prediction(sweep, profile())
    run = run_of(sweep, predict)
    errors = {
        (policy, load): (point.predicted_tokens_per_s or 0.0) / point.tokens_per_s - 1.0
        for policy, points in run.policies.items()
        for load, point in points.items()
    }
    print({k: f"{v:+.3f}" for k, v in errors.items()})
    print(run.auto_over_best, run.geometric_mean)
    assert max(map(abs, errors.values())) < 0.1, errors
    assert run.largest_prediction_error == pytest.approx(max(map(abs, errors.values())))


def test_costs_of_the_time_of_a_load_take_the_place_of_a_profile_of_another_day(
    sweep: Sweep,
) -> None:
    """A machine that was three times as slow when it was profiled."""
    predict = prediction(sweep, profile(lambda *step: 3.0 * staircase(*step)))
    found = LoadResults(sweep.results.path, settings={})
    for costs, written in (
        (found.costs, sweep.results.costs),  # by the steps of `auto`
        (found.profiles, sweep.results.profiles),  # by steps beside the load
    ):
        assert costs == written
        assert set(costs) == {(0.0, load) for load in CONFIG.loads}
        run = run_of(sweep, predict, live=replace(predict, costs=costs))
        assert (run.largest_prediction_error or 0.0) > 0.5
        assert (run.largest_live_prediction_error or 1.0) < 0.1
