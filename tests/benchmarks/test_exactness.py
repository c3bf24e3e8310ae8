import json
from collections import Counter
from collections.abc import Sequence

import pytest

from dspark.benchmarks import exactness
from dspark.benchmarks.exactness import MIXED, ExactnessConfig, measure, report_of
from dspark.completion import Job
from dspark.core import SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM

PROMPTS = [[5 + i, 6, 7, 8 + i] for i in range(6)]


def test_every_answer_of_an_exact_engine_is_the_plain_one(llm: LLM) -> None:
    heard: Counter[str] = Counter()
    config = ExactnessConfig(
        max_new_tokens=10, batches=["1", "4", MIXED], reference_batch=3, ignore_eos=True
    )
    runs = measure(
        llm,
        PROMPTS,
        arithmetic="fp32",
        config=config,
        on_progress=lambda name, done, total: heard.update([name]),
    )
    report = report_of(runs, num_prompts=len(PROMPTS), config=config)
    line = json.loads(json.dumps(report.to_json()))
    assert line["identical"] is True
    assert [(run["temperature"], run["batch"]) for run in line["runs"]] == [
        (temperature, batch) for temperature in (0.0, 1.0) for batch in config.batches
    ]
    for run in line["runs"]:
        assert (run["identical"], run["total"], run["tokens"]) == (6, 6, 60)
        assert run["first_divergence"] is None
    assert set(heard.values()) == {len(PROMPTS)}
    assert len(heard) == 2 * (1 + len(config.batches))


def test_one_wrong_token_is_found_and_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose fourth token of the third answer is wrong as soon as a drafter helps."""
    drain = LLM.drain

    def wrong(self: LLM, take, *, speculation: bool = True):
        for job, answer in drain(self, take, speculation=speculation):
            if speculation and job.key == "2":
                answer.token_ids[3] += 1
            yield job, answer

    monkeypatch.setattr(LLM, "drain", wrong)
    config = ExactnessConfig(max_new_tokens=6, temperatures=[0.0], batches=["4"], ignore_eos=True)
    (run,) = measure(llm, PROMPTS, arithmetic="fp32", config=config)
    assert (run.identical, run.total) == (5, 6)
    assert run.first_divergence is not None
    assert run.first_divergence.prompt == 2
    assert run.first_divergence.divergence.position == 3
    assert run.first_divergence.divergence.top2_gap > run.first_divergence.divergence.noise
    assert not report_of([run], num_prompts=6, config=config).identical


def _taken(line: exactness._Line, steps: int) -> list[int]:
    """Jobs that each of some steps of an engine finds, one ending after each step."""
    counts = []
    for _ in range(steps):
        count = 0
        while line.take() is not None:
            count += 1
        counts.append(count)
        line.num_running = max(0, line.num_running - 1)
    return counts


def _jobs(number: int) -> list[Job]:
    return [Job(key=str(i), prompt=[1], params=SamplingParams()) for i in range(number)]


def test_mixed_requests_come_at_different_steps_and_all_of_them() -> None:
    counts = _taken(exactness._Line(_jobs(40), True), 120)
    assert sum(counts) == 40
    assert {0, 1, 2} <= set(counts)
    assert max(counts) < 8


def test_other_batches_find_everything_waiting() -> None:
    assert _taken(exactness._Line(_jobs(9), False), 3) == [9, 0, 0]


def test_mixed_requests_allow_different_numbers_of_drafts() -> None:
    widths = [exactness._narrowed(job, i).params.max_draft for i, job in enumerate(_jobs(5))]
    assert widths == [None, 0, 1, 3, None]


def test_seeds_differ_by_prompt_and_greedy_has_none() -> None:
    config = ExactnessConfig(seed=7)
    assert [j.params.seed for j in exactness._jobs(PROMPTS[:2], 1.0, config)] == [7, 8]
    assert [j.params.seed for j in exactness._jobs(PROMPTS[:2], 0.0, config)] == [None, None]


@pytest.mark.parametrize(
    "changes", [{"batches": ["0"]}, {"batches": ["many"]}, {"reference_batch": 0}], ids=str
)
def test_batches_of_nothing_are_refused(changes: dict[str, Sequence[str] | int]) -> None:
    with pytest.raises(InputError, match="must be"):
        ExactnessConfig(**changes)
