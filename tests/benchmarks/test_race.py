from pathlib import Path

import pytest

from dspark.benchmarks import race
from dspark.benchmarks.peers import chosen_peers
from dspark.benchmarks.race import Places, RaceConfig, Speed
from dspark.errors import InputError


def test_speed_is_the_median_and_the_ends() -> None:
    assert Speed.of([3.0, 1.0, 2.0]) == Speed(median=2.0, min=1.0, max=3.0)


def test_ratios_are_ours_over_theirs_and_families_stand_for_their_best() -> None:
    speeds = {
        "dspark-int8": 60.0,
        "dspark-plain-int8": 30.0,
        "dspark-plain-bf16": 20.0,
        "llama-cpp-q8_0": 15.0,
        "llama-cpp-bf16": 10.0,
        "vllm": 5.0,
    }
    families = {name: "dspark" for name in speeds if name.startswith("dspark")}
    families |= {"llama-cpp-q8_0": "llama-cpp", "llama-cpp-bf16": "llama-cpp", "vllm": "vllm"}
    ratios = race.ratios(speeds, families)
    assert ratios["dspark/llama-cpp"] == 4.0
    assert ratios["dspark-plain/llama-cpp"] == 2.0
    assert ratios["dspark/vllm"] == 12.0
    assert ratios["dspark-plain-int8/llama-cpp-q8_0"] == 2.0
    assert ratios["dspark-plain-bf16/llama-cpp-bf16"] == 2.0
    assert ratios["dspark-int8/dspark-plain-int8"] == 2.0
    assert len(ratios) == 2 * 2 + 3 * 3 + 1


@pytest.mark.parametrize(
    "changes", [{"rounds": 0}, {"max_new_tokens": 1}, {"num_threads": 0}], ids=str
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least"):
        RaceConfig(**changes)


def test_a_peer_that_is_not_there_is_named_with_its_command(tmp_path: Path) -> None:
    found = race.run(
        chosen_peers(["vllm", "openvino-int8"]),
        {"0": [[1, 2]]},
        source="nowhere",
        config=RaceConfig(),
        places=Places(folder=tmp_path),
    )
    assert found.missing == {
        "vllm": "dspark bench peers vllm",
        "vllm-ngram": "dspark bench peers vllm",
        "openvino-int8": "dspark bench peers openvino",
    }
    assert not found.entrants
