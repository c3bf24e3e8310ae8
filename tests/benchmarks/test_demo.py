import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from dspark.benchmarks.demo import DemoConfig, Verdict, run
from dspark.benchmarks.demo_screen import print_demo
from dspark.benchmarks.workload import Prompt
from dspark.errors import InputError
from dspark.llm import LLM

SHORT = DemoConfig(num_prompts=3, max_new_tokens=8, repeats=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_toy_model_answers_identically_in_fp32(llm: LLM, temperature: float) -> None:
    report = run(llm, replace(SHORT, temperature=temperature))
    assert report.verdict is Verdict.IDENTICAL
    assert report.identical
    assert [prompt.new_tokens for prompt in report.prompts] == [8, 8, 8]
    assert [row.domain for row in report.domains] == ["math", "code", "chat"]
    assert all(prompt.tau >= 1.0 for prompt in report.prompts)


def test_the_json_has_the_agreed_keys(llm: LLM) -> None:
    line = json.loads(json.dumps(run(llm, SHORT).to_json()))
    assert {"dtype", "temperature", "prompts", "median_speedup", "tau", "identical"} <= line.keys()
    assert {
        "domain",
        "plain_tokens_per_s",
        "dspark_tokens_per_s",
        "speedup",
        "tau",
        "identical",
        "divergence",
    } <= line["prompts"][0].keys()
    assert line["dtype"] == "fp32"


def test_a_run_in_which_nothing_was_drafted_is_inconclusive(llm: LLM) -> None:
    """UC-015: equal texts prove nothing when the drafter did not take part."""
    undrafted = LLM(llm.target, tokenizer=llm.tokenizer, drafter=None, config=llm.config)
    report = run(undrafted, SHORT)
    assert report.identical
    assert report.verdict is Verdict.INCONCLUSIVE
    assert not report.verdict.is_pass


def test_a_wrong_acceptance_is_caught_as_a_difference(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself must be able to fail: here speculation answers another seed's request."""
    honest = llm.generate

    def cheating(prompts, params, *, speculation=True):
        if speculation:
            params = replace(params, seed=params.seed + 99)
        return honest(prompts, params, speculation=speculation)

    monkeypatch.setattr(llm, "generate", cheating)
    report = run(llm, replace(SHORT, temperature=1.0))
    assert report.verdict is Verdict.DIFFERENT
    assert not report.identical
    assert any(p.divergence is not None and not p.divergence.explained for p in report.prompts)


def test_a_target_that_differs_from_itself_is_named_as_such(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-014: the plain answers are compared with each other before speculation is blamed."""
    honest, calls = llm.generate, iter(range(1000))

    def unstable(prompts, params, *, speculation=True):
        return honest(prompts, replace(params, seed=next(calls)), speculation=speculation)

    monkeypatch.setattr(llm, "generate", unstable)
    report = run(llm, replace(SHORT, temperature=1.0, repeats=2))
    assert report.verdict is Verdict.UNSTABLE


def test_a_watcher_sees_both_answers_stream(llm: LLM) -> None:
    seen: list[str] = []

    class Recorder:
        def on_prompt(self, number: int, total: int, prompt: Prompt) -> None:
            seen.append(f"prompt {number}/{total}")

        def on_answer(self, *, is_dspark: bool) -> None:
            seen.append("dspark" if is_dspark else "plain")

        def on_piece(self, piece) -> None:
            seen.extend("token" for _ in piece.token_ids)

        def on_result(self, report) -> None:
            seen.append("result")

    run(llm, replace(SHORT, num_prompts=1), watcher=Recorder())
    assert seen == ["prompt 1/1", "plain", *["token"] * 8, "dspark", *["token"] * 8, "result"]


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"max_new_tokens": 0}])
def test_settings_out_of_range_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        replace(SHORT, **changes)


def test_more_prompts_than_there_are_is_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="between 1 and 15"):
        run(llm, replace(SHORT, num_prompts=16))


@pytest.mark.parametrize(("factor", "is_advised_against"), [(0.5, True), (2.0, False)])
def test_the_summary_is_about_time_and_says_when_not_to_draft(
    llm: LLM, factor: float, is_advised_against: bool
) -> None:
    """UC-153, UC-165: a fine acceptance with lost time is called a loss."""
    report = replace(run(llm, SHORT), median_speedup=factor)
    out = io.StringIO()
    print_demo(Console(file=out, width=200), report)
    last = out.getvalue().splitlines()[-2:]
    assert any(f"median speed-up x{factor:.2f}" in line for line in last)
    assert ("do not enable" in last[-1]) is is_advised_against
