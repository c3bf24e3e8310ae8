"""The command line as a person uses it, on a toy model, in this process."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspark import artifacts
from dspark.artifacts import read_calibration
from dspark.commands import shared
from tests.command_line import Run


@pytest.fixture
def model(model_dir: Path, drafter_dir: Path) -> Sequence[object]:
    return ("--target", model_dir, "--drafter", drafter_dir, "--dtype", "fp32", "--eager")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"p{i}", "domain": domain, "turns": [f"hello number {i}"]}
        for i, domain in enumerate(["math", "code", "math", "code"])
    ]
    rows.append({"id": "bad", "turns": []})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_help_of_every_command_works_without_torch() -> None:
    """UC-162: and it is quick, since nothing heavy is imported; every command that there is."""
    missing = ("torch", "transformers", "numpy", "safetensors", "fastapi", "xgrammar", "ray")
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({missing!r}))\n"
        "from typer.testing import CliRunner\n"
        "from dspark.cli import app, bench\n"
        "def names(group):\n"
        "    return [c.name or c.callback.__name__ for c in group.registered_commands]\n"
        "commands = [(), ('bench',), *((name,) for name in names(app))]\n"
        "commands += [('bench', name) for name in names(bench)]\n"
        "assert len(commands) > 25, commands\n"
        "for command in commands:\n"
        "    done = CliRunner().invoke(app, [*command, '--help'], prog_name='dspark')\n"
        "    assert done.exit_code == 0, (command, done.output)\n"
        "    assert 'Usage: ' + ' '.join(['dspark', *command]) in done.output, done.output\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_shows_the_default_that_the_dataclass_owns(run: Run) -> None:
    text = run("generate", "--help").out
    assert "256" in text  # SamplingParams.max_tokens
    assert "Tokens of the answer, at most" in " ".join(text.replace("│", " ").split())


def test_generate_prints_the_answer_and_its_figures_apart(
    run: Run, model: Sequence[object]
) -> None:
    done = run("generate", "hello", *model, "--seed", 1, "--max-tokens", 8)
    assert done.code == 0
    assert len(done.out.strip()) > 1
    assert "8 tokens" in done.err
    assert "tokens/s" not in done.out
    assert "no drafter" not in done.err
    plain = run("generate", "hello", *model, "--plain", "--max-tokens", 8)
    assert plain.err.rstrip().endswith("1.00 tokens a step, no drafter")


def test_who_waits_for_step_costs_is_told_so_once(
    run: Run, model: Sequence[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error output is a log here: a status that only terminals show would say nothing."""
    monkeypatch.setattr(artifacts, "default_cache", lambda: tmp_path)
    options = ("hello", *model, "--max-tokens", 2)
    first = run("generate", *options).err.splitlines()
    assert first[0] == "loading the models"
    assert first[1].startswith("measuring what steps cost on this machine")
    assert "measuring" not in run("generate", *options).err
    assert "measuring" not in run("generate", *options, "--plain").err


def test_plain_and_drafted_text_are_the_same(run: Run, model: Sequence[object]) -> None:
    options = ("--seed", 5, "--max-tokens", 12, "--json")
    drafted = run("generate", "hello", *model, *options).last_json()
    plain = run("generate", "hello", *model, *options, "--plain").last_json()
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    assert set(plain["origins"]) == {"plain"}
    assert drafted["completion_tokens"] == 12


def test_a_stop_string_never_shows(run: Run, model: Sequence[object]) -> None:
    options = (*model, "--seed", 1, "--max-tokens", 16, "--json")
    whole = run("generate", "hello", *options).last_json()["text"]
    stop = whole[5:7]
    cut = run("generate", "hello", *options, "--stop", stop).last_json()
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("  ",), "The prompt is empty"),
        (("hello", "--temperature", "-1"), "temperature is -1.0"),
        (("hello", "--coupling", "loose"), "coupling is 'loose'"),
        (("hello " * 400,), "shorten the prompt"),
        (("hello", "--raw", "--system", "x"), "needs a chat template"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    run: Run, model: Sequence[object], arguments: Sequence[str], sentence: str
) -> None:
    done = run("generate", arguments[0], *model, "--policy", "fixed", *arguments[1:])
    assert done.code == 1
    assert sentence in done.complaint()
    assert done.out == ""


def test_a_missing_model_is_named(run: Run, tmp_path: Path) -> None:
    done = run("generate", "hello", "--target", tmp_path / "nothing")
    assert done.code == 1
    assert str(tmp_path / "nothing") in done.complaint()


def test_a_missing_drafter_is_named(run: Run, model_dir: Path, tmp_path: Path) -> None:
    done = run("demo", "--target", model_dir, "--drafter", tmp_path / "nothing", "--eager")
    assert done.code == 1
    assert str(tmp_path / "nothing") in done.err
    assert "Traceback" not in done.err


def test_an_unknown_option_is_refused_by_name(run: Run) -> None:
    done = run("generate", "hello", "--temprature", 0)
    assert done.code == 2
    assert "temprature" in done.err


def test_demo_ends_with_the_table_and_exit_code_0(run: Run, model: Sequence[object]) -> None:
    done = run("demo", *model, "--prompts", 3, "--max-new-tokens", 6, "--repeats", 1)
    assert done.code == 0, done.err
    for word in ("math", "code", "chat", "speed-up", "tau", "identical"):
        assert word in done.out


def test_demo_json_is_one_line_and_nothing_else(run: Run, model: Sequence[object]) -> None:
    done = run("demo", *model, "--prompts", 1, "--max-new-tokens", 6, "--repeats", 1, "--json")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    assert done.last_json()["identical"] is True


def test_demo_without_drafting_is_inconclusive_and_fails(run: Run, model_dir: Path) -> None:
    """UC-015."""
    done = run(
        *("demo", "--target", model_dir, "--drafter", "none", "--dtype", "fp32", "--eager"),
        *("--prompts", 1, "--max-new-tokens", 4, "--repeats", 1),
    )
    assert done.code == 1
    assert "INCONCLUSIVE" in done.out


def test_demo_says_at_once_that_no_drafter_is_shipped(run: Run, model_dir: Path) -> None:
    done = run("demo", "--target", model_dir, "--dtype", "fp32", "--eager")
    assert done.code == 1
    assert "No drafter is shipped" in done.err


def test_bench_step_reports_every_size(run: Run, model_dir: Path) -> None:
    done = run(
        *("bench", "step", "--target", model_dir, "--dtype", "fp32", "--eager"),
        *("--context", 8, "--repeats", 1, "--json"),
    )
    assert done.code == 0, done.err
    sizes = ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert list(done.last_json()["one_request_ms"]) == sizes
    assert list(done.last_json()["many_requests_ms"]) == sizes
    assert {"ours", "pytorch"} <= done.last_json()["prefill_ms"].keys()


def test_bench_single_refuses_an_unknown_peer(run: Run, model_dir: Path) -> None:
    done = run("bench", "single", "--target", model_dir, "--peers", "transformers,ollama")
    assert done.code == 1
    assert "ollama" in done.err
    assert "llama-cpp" in done.err


def test_bench_single_refuses_a_python_without_a_name(run: Run, model_dir: Path) -> None:
    done = run("bench", "single", "--target", model_dir, "--peer-python", "/usr/bin/python")
    assert done.code == 1
    assert "peer-python" in done.err


def test_bench_throughput_refuses_sizes_that_are_no_numbers(run: Run) -> None:
    done = run("bench", "throughput", "--concurrency", "8,many")
    assert done.code == 1
    assert "'many'" in done.err


def test_bench_exact_says_yes_by_exit_code(
    run: Run, model: Sequence[object], prompts: Path
) -> None:
    done = run(
        *("bench", "exact", prompts, *model[:4], "--eager", "--arithmetic", "fp32"),
        *("--limit", 2, "--max-new-tokens", 6, "--batches", "2,mixed", "--json"),
    )
    assert done.code == 0, done.err
    line = done.last_json()
    assert line["identical"] is True
    assert [run["batch"] for run in line["runs"]] == ["2", "mixed"] * 2
    assert line["conclusive"] is True


def test_bench_exact_proves_nothing_where_nothing_is_drafted(
    run: Run, model: Sequence[object], prompts: Path
) -> None:
    """UC-015: all answers are equal, and the exit code says no."""
    done = run(
        *("bench", "exact", prompts, *model[:4], "--eager", "--arithmetic", "fp32"),
        *("--limit", 1, "--max-new-tokens", 6, "--batches", 1, "--policy", "none"),
        *("--temperatures", 0),
    )
    assert done.code == 1
    assert "INCONCLUSIVE" in done.out
    assert "1/1" in done.out


def test_bench_load_measures_goes_on_and_feeds_the_simulator(
    run: Run, model: Sequence[object], tmp_path: Path
) -> None:
    """The record of a sweep and any table of costs are all that `simulate` needs."""
    results, record, pictures = tmp_path / "r.jsonl", tmp_path / "rounds.jsonl", tmp_path / "p"
    command = [
        "bench", "load", *model, "--policies", "auto,none,fixed:2", "--concurrency", "1,2",
        "--temperatures", "0", "--repeats", "1", "--unit-seconds", "0.02", "--limit", "1",
        "--max-new-tokens", "8", "--results", results, "--record", record, "--json",
    ]  # fmt: skip
    first = run(*command, "--plots", pictures)
    assert first.code == 0, first.err
    line = first.last_json()
    assert set(line["policies"]) == {"auto", "none", "fixed:2"}
    assert set(line["policies"]["none"]) == {"1", "2"}
    assert line["policies"]["auto"]["1"]["predicted_tokens_per_s"] > 0
    assert {path.name for path in pictures.iterdir()} == {
        "load-frontier-t0.png",
        "load-budget-t0.png",
    }
    again = run(*command)
    assert again.last_json()["policies"] == line["policies"]  # nothing was measured again
    table = tmp_path / "cost.json"
    table.write_text(
        json.dumps({"draft_curve": [[1, 1], [64, 2]], "verify_curve": [[1, 10], [256, 60]]})
    )
    for rounds in (record, results):
        found = run(
            "simulate", rounds, "--cost", table, "--policies", "auto,none", "--concurrency", "1,4",
            "--rates", "3", "--requests", "20", "--json",
        )  # fmt: skip
        assert found.code == 0, found.err
        assert found.last_json()["policies"]["none"]["1"]["tokens_per_s"] > 50
    words = run("simulate", record, "--cost", table, "--requests", "10", "--concurrency", "2")
    assert "auto over plain decoding" in words.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "two"], "whole numbers"),
        (["--policies", "best"], "best"),
        (["--concurrency", ""], "give --concurrency or --rates"),
    ],
)
def test_bench_load_refuses_what_cannot_be_measured(
    run: Run, model: Sequence[object], options: Sequence[object], message: str
) -> None:
    found = run("bench", "load", *model, *options)
    assert found.code == 1
    assert message in found.err


def test_simulate_needs_a_load(run: Run, tmp_path: Path) -> None:
    """An empty table would look like an answer."""
    record = tmp_path / "rounds.jsonl"
    answer = {"prompt": "a", "temperature": 1.0, "rounds": []}
    record.write_text(json.dumps(answer) + "\n")
    found = run("simulate", record, "--cost", record, "--concurrency", "")
    assert found.code == 1
    assert "There is no load; give --concurrency, --rates or --trace." in found.err


def test_simulate_names_a_file_that_holds_no_rounds(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    found = run("simulate", path, "--cost", path)
    assert found.code == 1
    assert "line 1 is no recorded answer" in found.err


def test_bench_perplexity_compares_arithmetics(
    run: Run, model: Sequence[object], prompts: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    target = model[:2]
    assert run("prepare", prompts, "--out", answers, *target, "--max-new-tokens", 6).code == 0
    options = ("--arithmetic", "fp32,int8", "--eager", "--limit", 3, "--json")
    done = run("bench", "perplexity", answers, *target, *options)
    assert done.code == 0, done.err
    assert done.last_json()["answers"] == 3
    assert 0.9 < done.last_json()["ratios"]["int8/fp32"] < 1.1


def test_evaluate_reports_tau_by_domain_and_the_head_s_worth(
    run: Run, model: Sequence[object], prompts: Path, tmp_path: Path
) -> None:
    plots, results = tmp_path / "plots", tmp_path / "results.jsonl"
    done = run(
        *("evaluate", prompts, *model, "--max-new-tokens", 10, "--temperature", 1),
        *("--temperature", 0, "--heads-off", "--against-plain", "--json"),
        *("--plots", plots, "--results", results),
    )
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    line = done.last_json()
    assert line["temperature"] == 1.0
    assert [part["temperature"] for part in line["runs"]] == [1.0, 0.0]
    with_head, without = line["drafters"].values()
    assert list(with_head["tasks"]) == ["prompts/math", "prompts/code"]
    for task in with_head["tasks"].values():
        assert 1.0 <= task["tau"] <= 5.0
        assert task["num_prompts"] == 2
        assert task["speedup"] > 0.0
        assert {"tau_ci95", "acceptance_planned", "acceptance_offered"} <= task.keys()
        assert {"conditional", "tokens_per_s"} <= task.keys()
    assert without["macro_tau"] >= 1.0
    assert 0.0 < without["mean_ece"] < 1.0  # of the odds of its likeliest tokens
    assert results.read_text().count("\n") == 1 + 2 * 3 * 4
    assert len(list(plots.glob("*.png"))) == 8
    assert "speed over plain decoding" in done.err


def test_evaluate_keeps_no_results_where_none_were_asked_for(
    run: Run, model: Sequence[object], prompts: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ("evaluate", prompts, *model, "--max-new-tokens", 4, "--tasks", "prompts/code")
    done = run(*options, "--limit", 1)
    assert done.code == 0, done.err
    assert "tokens per round (tau)" in done.out
    assert "prompts/math" not in done.out
    assert list((tmp_path / ".cache/dspark/evaluations").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tasks", "poems"), "There is no task 'poems'"),
        (("--drafter", "none"), "--against-plain"),
        (("--width", "0"), "width is 0"),
    ],
)
def test_evaluate_refuses_what_cannot_be_evaluated(
    run: Run, model_dir: Path, prompts: Path, options: Sequence[str], sentence: str
) -> None:
    done = run("evaluate", prompts, "--target", model_dir, "--dtype", "fp32", "--eager", *options)
    assert done.code == 1
    assert sentence in " ".join(done.err.split())


def test_a_base_model_is_prepared_for_and_evaluated_without_a_template(
    run: Run, model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    """Texts in, continuations out, from the answers file to the drafter's figures."""
    base, out = tmp_path / "base", tmp_path / "answers.jsonl"
    shutil.copytree(model_dir, base)
    (base / "chat_template.jinja").unlink()
    shared = ("--target", base, "--dtype", "fp32", "--eager")
    options = ("--raw", "--max-new-tokens", 8, "--concurrency", 2)
    prepared = run("prepare", prompts, "--out", out, *shared, *options)
    assert prepared.code == 0, prepared.err
    settings = json.loads(out.read_text().splitlines()[0])["prepare"]
    assert settings["template_hash"] is None
    sizes = ("--steps", 2, "--num-layers", 1, "--block-size", 3, "--markov-rank", 4)
    fewer = ("--draft-vocab-size", 64, "--num-held-out", 1, "--answers-per-step", 2)
    trained = run("train", out, "--out", tmp_path / "drafter", *shared, *sizes, *fewer)
    assert trained.code == 0, trained.err
    evaluated = run(
        *("evaluate", prompts, *shared, "--drafter", tmp_path / "drafter", "--raw"),
        *("--max-new-tokens", 6, "--limit", 1, "--json"),
    )
    assert evaluated.code == 0, evaluated.err
    assert evaluated.last_json()["drafters"]


def test_prepare_answers_each_prompt_once_and_goes_on_after_a_stop(
    run: Run, model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = (
        *("prepare", prompts, "--out", out, "--target", model_dir, "--dtype", "fp32", "--eager"),
        *("--max-new-tokens", 6, "--concurrency", 2),
    )
    first = run(*arguments, "--limit", 2)
    assert first.code == 0, first.err
    second = run(*arguments)
    assert second.code == 0, second.err
    assert "2 were there" in second.out
    assert "1 rows left out, empty conversation (lines 5)" in " ".join(second.err.split())
    settings, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert settings["prepare"]["max_new_tokens"] == 6
    temperatures = {row["id"]: row["temperature"] for row in rows}
    assert temperatures == {"p0": 0.7, "p1": 1.0, "p2": 0.7, "p3": 1.0}
    assert all(1 <= len(row["token_ids"]) <= 6 for row in rows)
    other = run(*arguments, "--system", "Be brief.")
    assert other.code == 1
    assert "made with system None" in other.err


def test_what_was_learnt_under_a_system_prompt_is_evaluated_under_it(
    run: Run, model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UC-102: the conditions of the answers travel with the drafter."""
    answers, drafter = tmp_path / "answers.jsonl", tmp_path / "drafter"
    target = ("--target", model_dir, "--dtype", "fp32")
    run(
        *("prepare", prompts, "--out", answers, *target, "--eager", "--system", "Be brief."),
        *("--max-new-tokens", 12, "--concurrency", 4),
    )
    done = run(
        *("train", answers, "--out", drafter, *target, "--steps", 1, "--num-layers", 1),
        *("--block-size", 2, "--markov-rank", 4, "--draft-vocab-size", 64, "--num-held-out", 1),
        *("--answers-per-step", 2, "--validate-every", 1, "--eager"),
    )
    assert done.code == 0, done.err
    document = json.loads((drafter / "config.json").read_text())["dspark"]
    assert document["target"]["system"] == "Be brief."
    assert document["recipe"]["answers"]["max_new_tokens"] == 12
    results = tmp_path / "results.jsonl"
    options = ("evaluate", prompts, *target, "--drafter", drafter, "--eager", "--limit", 1)
    done = run(*options, "--max-new-tokens", 4, "--results", results)
    assert done.code == 0, done.err
    assert json.loads(results.read_text().splitlines()[0])["settings"]["system"] == "Be brief."
    refused = run(*options, "--thinking")
    assert refused.code == 1
    assert "no thinking mode" in refused.err


def test_ctrl_c_ends_prepare_behind_the_answers_in_hand(
    run: Run, model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = (
        *("prepare", prompts, "--out", out, "--target", model_dir, "--dtype", "fp32", "--eager"),
        *("--max-new-tokens", 6, "--concurrency", 1),
    )
    update = shared.Bars.update

    def interrupted(bars: shared.Bars, name: str, done: int, total: int) -> None:
        update(bars, name, done, total)
        if done == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(shared.Bars, "update", interrupted)
        first = run(*arguments)
    assert first.code == 130
    assert "nothing new is asked" in first.err
    assert "the same command goes on" in first.err
    num_done = len(out.read_text().splitlines()) - 1
    assert 1 <= num_done < 4
    second = run(*arguments)
    assert second.code == 0, second.err
    assert f"{num_done} were there" in second.out
    rows = [json.loads(line)["id"] for line in out.read_text().splitlines()[1:]]
    assert sorted(rows) == ["p0", "p1", "p2", "p3"]


def test_prepare_refuses_a_sampling_that_is_none(run: Run, prompts: Path, tmp_path: Path) -> None:
    done = run("prepare", prompts, "--out", tmp_path / "a.jsonl", "--sampling", "warm")
    assert done.code == 1
    assert "'warm'" in done.err


def test_train_writes_a_drafter_that_the_demo_can_use(
    run: Run, model_dir: Path, tmp_path: Path
) -> None:
    """The whole loop at toy size: prepare, train, demo (UC-163)."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(8)))
    answers, drafter = tmp_path / "answers.jsonl", tmp_path / "drafter"
    target = ("--target", model_dir, "--dtype", "fp32")
    prepared = run(
        *("prepare", prompts, "--out", answers, *target, "--eager"),
        *("--max-new-tokens", 24, "--concurrency", 4),
    )
    assert prepared.code == 0, prepared.err
    trained = run(
        *("train", answers, "--out", drafter, *target, "--steps", 2, "--num-layers", 1),
        *("--block-size", 3, "--markov-rank", 4, "--draft-vocab-size", 64, "--num-held-out", 2),
        *("--answers-per-step", 2, "--validate-every", 1, "--eager", "--json"),
    )
    assert trained.code == 0, trained.err
    assert trained.last_json()["steps"] == 2
    assert trained.last_json()["held_out_tau"] >= 1.0
    shown = run(
        *("demo", *target, "--drafter", drafter, "--eager"),
        *("--prompts", 1, "--max-new-tokens", 6, "--repeats", 1, "--json"),
    )
    assert shown.code == 0, shown.err
    assert shown.last_json()["identical"] is True


def test_every_kind_is_trained_evaluated_and_shown_by_the_same_commands(
    run: Run, model_dir: Path, tmp_path: Path
) -> None:
    """UC-092: the baselines, and prompt lookup, which nobody trains."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(6)))
    answers = tmp_path / "answers.jsonl"
    target = ("--target", model_dir, "--dtype", "fp32")
    prepared = run(
        *("prepare", prompts, "--out", answers, *target, "--eager"),
        *("--max-new-tokens", 12, "--concurrency", 6),
    )
    assert prepared.code == 0, prepared.err
    names = []
    for kind in ("dflash", "eagle3", "mtp"):
        trained = run(
            *("train", answers, "--out", tmp_path / kind, *target, "--kind", kind),
            *("--steps", 1, "--num-layers", 1, "--draft-vocab-size", 64, "--num-held-out", 2),
            *("--answers-per-step", 2, "--validate-every", 1, "--eager", "--json"),
        )
        assert trained.code == 0, trained.err
        assert trained.last_json()["held_out_tau"] >= 1.0
        names += ["--drafter", tmp_path / kind]
    names += ["--drafter", "prompt-lookup"]
    measured = run(
        *("evaluate", prompts, *target, *names, "--eager", "--limit", 2),
        *("--max-new-tokens", 8, "--temperature", 0, "--json"),
    )
    assert measured.code == 0, measured.err
    found = measured.last_json()["drafters"]
    assert sorted(found) == ["dflash", "eagle3", "mtp", "prompt-lookup"]
    calibrated = run(
        *("calibrate", prompts, *target, "--drafter", tmp_path / "dflash", "--eager"),
        *("--max-new-tokens", 100, "--temperature", 0, "--json"),
    )
    assert calibrated.code == 0, calibrated.err
    assert read_calibration(tmp_path / "dflash") is not None
    for drafter in (tmp_path / "eagle3", tmp_path / "mtp", "prompt-lookup"):
        shown = run(
            *("demo", *target, "--drafter", drafter, "--eager"),
            *("--prompts", 1, "--max-new-tokens", 12, "--repeats", 1, "--json"),
        )
        assert shown.last_json()["prompts"][0]["identical"] is True, shown.err


def test_train_wants_either_steps_or_minutes(
    run: Run, model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    run(
        *("prepare", prompts, "--out", answers, "--target", model_dir, "--dtype", "fp32"),
        *("--eager", "--max-new-tokens", 4, "--concurrency", 4),
    )
    done = run("train", answers, "--out", tmp_path / "d", "--target", model_dir)
    assert done.code == 1
    assert "exactly one" in done.err
    assert not (tmp_path / "d").exists()


def test_version_is_printed(run: Run) -> None:
    done = run("--version")
    assert done.code == 0
    assert done.out.startswith("dspark")
