import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.benchmarks import peers, single
from dspark.benchmarks.peers import Ours, engines
from dspark.benchmarks.single import SingleConfig, Speed, measure
from dspark.errors import InputError, ModelError

PROMPTS = ([5, 6, 7, 8], [9, 10, 11])


@pytest.mark.slow
def test_engines_of_one_run_are_timed_and_compared(model_dir: Path, drafter_dir: Path) -> None:
    """Each engine in its own process; ours plain and drafted must give the same text."""
    ours = Ours(target=str(model_dir), drafter=str(drafter_dir), dtype="fp32", compile=False)
    wanted = engines(ours, ["transformers", "vllm"], gguf_kinds=["bf16"])
    missing = replace(wanted[-1], package="no-such-package", install="pip install it")
    heard: list[tuple[int, str]] = []
    report = measure(
        [*wanted[:-1], missing],
        PROMPTS,
        config=SingleConfig(max_new_tokens=6, num_threads=1),
        on_round=lambda number, name, rate: heard.append((number, name)),
    )
    line = json.loads(json.dumps(report.to_json()))
    assert [engine["name"] for engine in line["engines"]] == [
        "dspark",
        "dspark-plain",
        "transformers",
    ]
    for engine in line["engines"]:
        speed = engine["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert {"version", "config"} <= engine.keys()
    assert line["engines"][0]["same_text_as_dspark_plain"] == 2
    assert set(line["ratios"]) == {
        "dspark/transformers",
        "dspark-plain/transformers",
        "dspark/dspark-plain",
    }
    assert line["missing"] == {"vllm": "pip install it"}
    assert len(heard) == 9


@pytest.mark.slow
def test_an_engine_that_dies_gives_an_error_and_no_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """UC-154: a crash is not a slow run."""
    (tmp_path / "config.json").write_text("{}")
    (broken,) = engines(Ours(target=str(tmp_path)), ["transformers"], gguf_kinds=[])[2:]
    with pytest.raises(ModelError, match=r"Engine transformers failed \(exit code 1\)"):
        measure([broken], PROMPTS, config=SingleConfig(num_threads=1))
    assert "Traceback" in capfd.readouterr().err


def test_dspark_without_a_drafter_is_refused_rather_than_timed_plain(model_dir: Path) -> None:
    ours = Ours(target=str(model_dir), dtype="fp32", compile=False)
    with pytest.raises(ModelError, match="no drafter is shipped"):
        peers.build(engines(ours, [], gguf_kinds=[])[0], num_threads=1)


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'ollama'"):
        engines(Ours(), ["ollama"], gguf_kinds=["bf16"])


def test_llama_cpp_runs_once_for_each_kind_of_weights() -> None:
    names = [e.name for e in engines(Ours(), ["llama-cpp"], gguf_kinds=["bf16", "shipped"])]
    assert names == ["dspark", "dspark-plain", "llama-cpp", "llama-cpp-shipped"]


def test_speed_is_the_median_and_the_ends() -> None:
    assert Speed.of([3.0, 1.0, 2.0]) == Speed(median=2.0, min=1.0, max=3.0)


def test_ratios_are_ours_over_theirs() -> None:
    ratios = single._ratios({"dspark": 30.0, "dspark-plain": 20.0, "llama-cpp": 10.0})
    assert ratios == {
        "dspark/llama-cpp": 3.0,
        "dspark-plain/llama-cpp": 2.0,
        "dspark/dspark-plain": 1.5,
    }


@pytest.mark.parametrize(
    "changes", [{"rounds": 2}, {"max_new_tokens": 1}, {"num_threads": 0}], ids=str
)
def test_measurements_without_a_spread_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least"):
        SingleConfig(**changes)
