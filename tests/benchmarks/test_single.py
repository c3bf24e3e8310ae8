import json
from pathlib import Path

import pytest

from dspark.benchmarks.peers import Ours, chosen_peers, our_engines
from dspark.benchmarks.race import Places, RaceConfig
from dspark.benchmarks.single import measure

PROMPTS = ([5, 6, 7, 8], [9, 10, 11])


@pytest.mark.slow
def test_engines_of_one_run_are_timed_and_compared(
    model_dir: Path, drafter_dir: Path, tmp_path: Path
) -> None:
    """Each engine in its own process; ours plain and drafted must give the same text."""
    ours = Ours(
        policy="fixed",
        target=str(model_dir),
        drafter=str(drafter_dir),
        arithmetics=["fp32"],
        compile=False,
    )
    heard: list[tuple[int, str]] = []
    ready: list[str] = []
    report = measure(
        [*our_engines(ours), *chosen_peers(["vllm-ngram"])],
        PROMPTS,
        source=ours.target,
        config=RaceConfig(max_new_tokens=6, num_threads=1, rounds=2),
        places=Places(folder=tmp_path),
        on_ready=ready.append,
        on_round=lambda number, name, rate: heard.append((number, name)),
    )
    line = json.loads(json.dumps(report.to_json()))
    names = ["dspark-fp32", "dspark-plain-fp32"]
    assert [engine["name"] for engine in line["engines"]] == names == ready
    for engine in line["engines"]:
        speed = engine["tokens_per_s"]
        assert 0 < speed["min"] <= speed["median"] <= speed["max"]
        assert {"version", "config"} <= engine.keys()
    assert line["engines"][0]["same_text_as_dspark_plain"] == 2
    assert set(line["ratios"]) == {"dspark-fp32/dspark-plain-fp32"}
    assert line["missing"] == {"vllm-ngram": "dspark bench peers vllm"}
    assert heard == [(number, name) for number in range(2) for name in names]
