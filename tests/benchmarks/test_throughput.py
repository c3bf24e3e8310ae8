import json
from pathlib import Path

import pytest

from dspark.benchmarks.peers import Ours, our_engines
from dspark.benchmarks.race import Places, RaceConfig
from dspark.benchmarks.throughput import measure
from dspark.errors import InputError

PROMPTS = ([5, 6, 7, 8], [9, 10, 11], [12, 13])


@pytest.mark.slow
def test_batches_of_every_size_are_timed_together(model_dir: Path, tmp_path: Path) -> None:
    ours = Ours(target=str(model_dir), drafter="none", arithmetics=["fp32"], compile=False)
    report = measure(
        our_engines(ours),
        PROMPTS,
        concurrency=[1, 3],
        source=ours.target,
        config=RaceConfig(max_new_tokens=5, num_threads=1, rounds=1),
        places=Places(folder=tmp_path),
    )
    line = json.loads(json.dumps(report.to_json()))
    assert [engine["name"] for engine in line["engines"]] == ["dspark-plain-fp32"]
    for engine in line["engines"]:
        assert engine["tokens_per_s"].keys() == {"1", "3"}
        assert engine["tokens_per_s"]["3"]["median"] > 0
    assert line["ratios"] == {"1": {}, "3": {}}
    assert line["prompt_tokens"] == [4, 3, 2]


@pytest.mark.parametrize("concurrency", [[], [0], [4]], ids=str)
def test_more_requests_than_different_prompts_are_refused(
    concurrency: list[int], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"1\.\.3"):
        measure(
            [], PROMPTS, concurrency=concurrency, source="x", config=RaceConfig(), places=Places()
        )
