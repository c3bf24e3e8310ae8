"""Evaluation on a toy target: counts, resume after a crash, several drafters, an oracle."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.algorithms.survival import AcceptanceStats
from dspark.benchmarks.evaluation import Contender, EvaluationConfig, evaluate, settings_of
from dspark.benchmarks.evaluation_report import DrafterShape, EvaluationReport, report_of
from dspark.benchmarks.journal import Cell, Journal, PromptRecord
from dspark.core import DraftBlock, SamplingParams
from dspark.engine.cycle import CycleConfig
from dspark.engine.live_request import LiveRequest
from dspark.engine.proposer import StepStates
from dspark.errors import InputError
from dspark.llm import LLM

CONFIG = EvaluationConfig(max_new_tokens=12, batch_size=2)
TASKS = {
    "math": [[{"role": "user", "content": f"add {n} and {n}"}] for n in range(3)],
    "chat": [[{"role": "user", "content": f"hello {n}"}] for n in range(2)],
}
SHAPES = {"d": DrafterShape(kind="dspark", layers=2, block_size=4, width=4)}


@pytest.fixture(scope="module")
def llm(toy_llm: LLM) -> LLM:
    return toy_llm.with_config(
        CycleConfig(max_requests=2, num_positions=2048, page_size=16, is_checked=True)
    )


def run(
    llm: LLM,
    path: Path,
    *,
    config: EvaluationConfig = CONFIG,
    tasks: Mapping[str, Sequence] = TASKS,
    names: Sequence[str] = ("random",),
    **options: object,
) -> EvaluationReport:
    journal = Journal(path, settings=settings_of(llm, config))
    contenders = {name: Contender(weights=name, load=lambda: llm) for name in names}
    return evaluate(contenders, tasks, config=config, journal=journal, **options)  # type: ignore[arg-type]


def test_counts_are_those_of_the_answers_one_by_one(llm: LLM, tmp_path: Path) -> None:
    report = run(llm, tmp_path / "r.jsonl", config=replace(CONFIG, temperatures=(0.0, 1.0)))
    assert [part.temperature for part in report.runs] == [0.0, 1.0]
    for part in report.runs:
        for task, chats in TASKS.items():
            total = AcceptanceStats()
            for index, chat in enumerate(chats):
                params = SamplingParams(
                    temperature=part.temperature,
                    max_tokens=12,
                    seed=index if part.temperature else None,
                    coupling=CONFIG.coupling,
                )
                total += llm.generate([chat], params)[0].stats.acceptance
            found = part.drafters["random"].tasks[task]
            assert found.tau == total.tau
            assert found.num_rounds == total.num_rounds
            assert found.acceptance_planned == total.acceptance_planned
            assert found.acceptance_offered == total.acceptance_offered
            assert list(found.conditional) == list(total.conditional_acceptance)
            assert list(found.survival) == list(total.position_acceptance)
            assert found.num_prompts == len(chats)
            assert found.tau_interval is not None
            assert found.tau_interval.low <= found.tau <= found.tau_interval.high
            assert found.tau_ci95 == found.tau_interval.half_width
        taus = [task.tau for task in part.drafters["random"].tasks.values()]
        assert part.drafters["random"].macro_tau == pytest.approx(sum(taus) / 2)


def test_a_crash_loses_what_was_in_flight_and_nothing_that_had_ended(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the same command measures the rest: the report equals an uninterrupted one."""
    config = replace(CONFIG, batch_size=1)
    whole = run(llm, tmp_path / "whole.jsonl", config=config)
    path, seen = tmp_path / "r.jsonl", []

    def die(_title: str, _done: int, _total: int) -> None:
        seen.append(path.read_text().count("\n"))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, path, config=config, on_prompt=die)
    assert seen == [2, 3, 4]  # the line with the settings, then each prompt as it ended
    with path.open("ab") as stream:
        stream.write(b'{"cell": {"drafter": "rand')  # a kill in the middle of a line
    asked: list[str] = []
    drain = llm.drain

    def counting(take, **options):  # type: ignore[no-untyped-def]
        for job, completion in drain(take, **options):
            asked.append(job.key)
            yield job, completion

    monkeypatch.setattr(llm, "drain", counting)
    resumed = run(llm, path, config=config)
    assert asked == ["0", "1"]  # the three of math were there
    assert without_clock(resumed) == without_clock(whole)


def without_clock(report: EvaluationReport) -> object:
    """The report as JSON, times taken out."""

    def clean(value: object) -> object:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if "per_s" not in k and "speed" not in k}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return clean(report.to_json())


def test_another_temperature_drafter_or_task_goes_into_the_same_file(
    llm: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    run(llm, path, tasks={"math": TASKS["math"]})
    lines = path.read_text().splitlines()
    report = run(llm, path, names=("random", "again"), has_plain=True)
    assert path.read_text().splitlines()[: len(lines)] == lines
    assert path.read_text().count("\n") == 1 + 3 * 5  # plain and two drafters, five prompts each
    one, other = report.runs[0].drafters.values()
    assert one.macro_tau == other.macro_tau
    for task in one.tasks.values():
        assert task.speedup is not None
        assert task.speedup_interval is not None
        assert task.speedup_interval.low <= task.speedup <= task.speedup_interval.high
    assert set(report.runs[0].plain_tokens_per_s) == set(TASKS)


def test_results_of_other_settings_or_other_files_are_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(llm, path, tasks={"chat": TASKS["chat"]})
    with pytest.raises(InputError, match="max_new_tokens 12, and now it is 8"):
        run(llm, path, config=replace(CONFIG, max_new_tokens=8))
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"turns": ["hello"]}\n')
    with pytest.raises(InputError, match="line 1 is no result"):
        run(llm, other)
    assert other.read_text() == '{"turns": ["hello"]}\n'
    with path.open("a") as stream:
        stream.write('{"cell": 3}\n')
    with pytest.raises(InputError, match="line 4 is no result"):
        run(llm, path)


def test_other_weights_under_the_same_name_are_measured_anew(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(llm, path, tasks={"chat": TASKS["chat"]})
    journal = Journal(path, settings=settings_of(llm, CONFIG))
    contenders = {"random": Contender(weights="retrained", load=lambda: llm)}
    evaluate(contenders, {"chat": TASKS["chat"]}, config=CONFIG, journal=journal)
    assert path.read_text().count("\n") == 1 + 2 + 2


def test_a_width_verifies_no_more_and_a_whole_block_is_the_default(
    llm: LLM, tmp_path: Path
) -> None:
    """Figures 3 and 4: the same weights at several serving widths, UC-090."""
    config = replace(CONFIG, widths=(1, 3, None))
    drafters = run(llm, tmp_path / "r.jsonl", config=config).runs[0].drafters
    assert list(drafters) == ["random, width 1", "random, width 3", "random"]
    assert [d.shape.width for d in drafters.values()] == [1, 3, 4]
    for drafter in drafters.values():
        assert drafter.shape.layers == 1
        for task in drafter.tasks.values():
            assert task.planned_per_round <= drafter.shape.width
            assert len(task.conditional) <= drafter.shape.width
            assert 1.0 <= task.tau <= drafter.shape.width + 1


def test_a_width_beyond_a_block_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    """UC-090: its figures would be those of a whole block under another name."""
    with pytest.raises(InputError, match="width is 5, but drafter 'random' drafts 4 tokens"):
        run(llm, tmp_path / "r.jsonl", config=replace(CONFIG, widths=(1, 5)))
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1


def test_confidences_are_judged_over_all_tasks_and_swept_in_each(llm: LLM, tmp_path: Path) -> None:
    drafter = run(llm, tmp_path / "r.jsonl").runs[0].drafters["random"]
    assert [p.calibration.k for p in drafter.positions] == [1, 2, 3, 4]
    for position in drafter.positions:
        assert 0.0 <= position.calibration.ece <= 1.0
        assert sum(b.count for b in position.bins) == position.calibration.count
    for task in drafter.tasks.values():
        assert task.ece is not None
        assert task.brier is not None
        everything = task.thresholds[0]
        assert (everything.threshold, everything.planned_per_round) == (0.0, 4.0)


class Oracle:
    """Proposes the target's own greedy answer, each token moved by `shift`."""

    def __init__(self, llm: LLM, *, block_size: int, shift: int) -> None:
        self.block_size = block_size
        self.tap_layers: tuple[int, ...] = ()
        self.vocabulary = None
        self._llm = llm
        self._shift = shift

    def feed(self, states: StepStates) -> None:
        pass

    def look(self, _requests: Sequence[LiveRequest]) -> dict[int, list[float]]:
        return {}

    def catch_up(self, requests: Sequence[LiveRequest], **_: object) -> None:
        pass

    def propose(self, requests: Sequence[LiveRequest], **_: object) -> DraftBlock:
        params = SamplingParams(temperature=0.0, max_tokens=self.block_size, ignore_eos=True)
        answers = self._llm.generate([list(live.tokens) for live in requests], params)
        tokens_RK = torch.tensor([list(answer.token_ids) for answer in answers])
        vocab_size = self._llm.target.spec.vocab_size
        return DraftBlock(
            tokens_RK=(tokens_RK + self._shift) % vocab_size, probs_RKS=None, confidence_RK=None
        )


@pytest.mark.parametrize(("shift", "share"), [(0, 1.0), (1, 0.0)])
def test_an_oracle_is_accepted_whole_and_a_wrong_one_never(
    toy_llm: LLM, tmp_path: Path, shift: int, share: float
) -> None:
    """UC-155: the gauge is checked against what is known, not against its own numbers."""
    llm = toy_llm.with_config(replace(toy_llm.config, copies=False)).with_policy("fixed")
    oracle = Oracle(toy_llm.with_drafter(None), block_size=4, shift=shift)
    llm.cycle(speculation=True)._proposer = oracle
    task = run(llm, tmp_path / "o.jsonl").runs[0].drafters["random"].tasks["math"]
    assert task.acceptance_planned == share
    assert task.conditional[0] == share
    assert task.tau == 1.0 if share == 0.0 else task.tau > 3.0
    assert (task.ece, task.auroc, task.thresholds) == (None, None, [])


def test_a_prompt_that_does_not_fit_is_named_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    tasks = {"long": [*TASKS["chat"], [{"role": "user", "content": "word " * 600}]]}
    with pytest.raises(InputError, match="Prompt 3 of task 'long' has"):
        run(llm, tmp_path / "r.jsonl", tasks=tasks)
    assert (tmp_path / "r.jsonl").read_text().count("\n") == 1


def test_nothing_drafted_is_nothing_to_report(llm: LLM, tmp_path: Path) -> None:
    """UC-015: no accepted length of 1.0 that looks like a measurement."""
    with pytest.raises(InputError, match="drafted nothing"):
        run(llm, tmp_path / "r.jsonl", config=replace(CONFIG, max_new_tokens=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"widths": (0,)}, "width is 0"),
        ({"temperatures": (-1.0,)}, "temperature is -1"),
        ({"temperatures": ()}, "at least one temperature"),
    ],
)
def test_values_that_cannot_be_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(CONFIG, **changes)


def record(index: int, *, planned: Sequence[int], accepted: Sequence[int], **changes: object):
    values = {
        "cell": Cell(drafter="d", weights="w", temperature=0.0, width=None, task="t"),
        "index": index,
        "prompt": str(index),
        "num_tokens": 1 + sum(accepted) + len(accepted),
        "seconds": 2.0,
        "finish_reason": "stop",
        "offered": [4] * len(planned),
        "planned": list(planned),
        "accepted": list(accepted),
        "committed": [count + 1 for count in accepted],
        "confidence": None,
    }
    return PromptRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_the_documented_trace_and_both_means_of_tau() -> None:
    """UC-147, UC-148: rounds (0, 2, 4 of 4) in one prompt, (4) in another."""
    records = [
        record(0, planned=[4, 4, 4], accepted=[0, 2, 4]),
        record(1, planned=[4], accepted=[4], finish_reason="length"),
    ]
    task = report_of(records[:1], SHAPES).runs[0].drafters["d"].tasks["t"]
    assert task.tau == 3.0
    assert task.acceptance_planned == 6 / 12
    assert task.survival == (2 / 3, 2 / 3, 1 / 3, 1 / 3)
    assert task.conditional == (2 / 3, 1.0, 0.5, 1.0)
    assert task.tau_interval is None
    both = report_of(records, SHAPES).runs[0].drafters["d"].tasks["t"]
    assert both.tau == 14 / 4
    assert both.mean_prompt_tau == (3.0 + 5.0) / 2
    assert (both.accepted_per_round, both.planned_per_round) == (10 / 4, 4.0)
    assert both.num_truncated == 1
    assert both.tokens_per_s == (10 + 6) / 4.0


def test_a_trimmed_token_is_no_rejection_in_any_figure() -> None:
    """Method section 8: planned 2 of 4 and both accepted; positions 3 and 4 were never seen."""
    task = (
        report_of([record(0, planned=[2], accepted=[2])], SHAPES).runs[0].drafters["d"].tasks["t"]
    )
    assert task.acceptance_planned == 1.0
    assert task.acceptance_offered == 0.5
    assert task.conditional == (1.0, 1.0)


def test_the_json_has_the_agreed_keys(llm: LLM, tmp_path: Path) -> None:
    line = json.loads(json.dumps(run(llm, tmp_path / "r.jsonl").to_json()))
    assert line["temperature"] == 0.0
    assert line["drafters"] == line["runs"][0]["drafters"]
    drafter = line["drafters"]["random"]
    assert {"macro_tau", "tasks"} <= drafter.keys()
    assert {
        *("tau", "tau_ci95", "acceptance_planned", "acceptance_offered", "conditional"),
        "tokens_per_s",
    } <= drafter["tasks"]["math"].keys()
