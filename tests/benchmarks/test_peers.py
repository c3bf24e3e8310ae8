import pytest

from dspark.benchmarks.peers import FAMILIES, Ours, chosen_peers, our_engines, peer_engines
from dspark.errors import InputError


def test_ours_come_drafted_and_plain_in_each_arithmetic() -> None:
    names = [engine.name for engine in our_engines(Ours())]
    assert names == [
        "dspark-bf16",
        "dspark-int8",
        "dspark-plain-bf16",
        "dspark-plain-int8",
    ]


@pytest.mark.parametrize(
    "ours", [Ours(target="model.gguf", arithmetics=["fp32"]), Ours(drafter="none")], ids=str
)
def test_without_a_drafter_only_plain_decoding_takes_part(ours: Ours) -> None:
    assert {engine.name for engine in our_engines(ours)} == {
        f"dspark-plain-{arithmetic}" for arithmetic in ours.arithmetics
    }


def test_int8_is_a_quantization_and_no_dtype() -> None:
    by_name = {engine.name: engine.settings for engine in our_engines(Ours())}
    assert by_name["dspark-int8"]["quantization"] == "int8"
    assert by_name["dspark-int8"]["dtype"] == "auto"
    assert by_name["dspark-plain-bf16"] == {
        "drafter": None,
        "dtype": "bf16",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "compile": True,
        "policy": "auto",
    }


def test_after_a_colon_comes_the_type_of_keys_and_values() -> None:
    by_name = {e.name: e.settings for e in our_engines(Ours(arithmetics=["int8:bf16"]))}
    settings = by_name["dspark-int8:bf16"]
    assert (settings["quantization"], settings["kv_cache_dtype"]) == ("int8", "bf16")


def test_a_family_brings_all_its_configurations_and_a_name_one() -> None:
    assert {e.name for e in chosen_peers(["llama-cpp"])} == {
        "llama-cpp-q4_0",
        "llama-cpp-shipped",
        "llama-cpp-q8_0",
        "llama-cpp-bf16",
    }
    assert [e.name for e in chosen_peers(["vllm-ngram", "openvino-int4"])] == [
        "vllm-ngram",
        "openvino-int4",
    ]
    assert [e.name for e in chosen_peers(["vllm"])] == ["vllm", "vllm-ngram"]
    assert chosen_peers(["openvino-int8", "openvino"]) == [
        *chosen_peers(["openvino-int8"]),
        *(e for e in chosen_peers(["openvino"]) if e.name != "openvino-int8"),
    ]


def test_names_are_unique_and_every_family_is_there() -> None:
    engines = peer_engines()
    assert len({engine.name for engine in engines}) == len(engines)
    assert {engine.family for engine in engines} == set(FAMILIES)


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'ollama'"):
        chosen_peers(["ollama"])


def test_an_unknown_arithmetic_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="'int4'"):
        our_engines(Ours(arithmetics=["bf16", "int4"]))
