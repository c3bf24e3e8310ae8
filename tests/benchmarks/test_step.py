import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dspark.benchmarks import step
from dspark.benchmarks.passes import Passes
from dspark.benchmarks.prefill import prefills
from dspark.benchmarks.step import StepConfig, measure, streamed_bytes
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.models.target import Target

IDS = [5, 9, 200, 17, 3, 8, 8, 1]


def test_every_shape_of_passes_gives_the_same_logits(llm: LLM) -> None:
    passes = Passes(llm.target, num_requests=1, num_positions=len(IDS))
    whole_TV = passes.score(IDS, chunks=[8])
    for chunks in ([1] * 8, [3, 1, 4], [5, 3]):
        torch.testing.assert_close(passes.score(IDS, chunks=chunks), whole_TV)


def test_rows_of_a_pass_do_not_see_each_other(llm: LLM) -> None:
    alone = Passes(llm.target, num_requests=1, num_positions=8).score(IDS, chunks=[8])
    both = Passes(llm.target, num_requests=2, num_positions=8).run([IDS[::-1], IDS], start=0)
    torch.testing.assert_close(both[8:], alone)


def test_the_report_has_the_agreed_keys_and_every_size(llm: LLM) -> None:
    sizes = (1, 2, 4)
    config = StepConfig(sizes=sizes, context=16, repeats=2, warmup=1)
    heard: list[tuple[str, int]] = []
    report = measure(
        llm.target,
        quantization=None,
        config=config,
        on_size=lambda shape, size, ms: heard.append((shape, size)),
    )
    line = json.loads(json.dumps(report.to_json()))
    assert {"dtype", "stream_bytes_per_s", "weight_bytes", "floor_ms"} <= line.keys()
    assert list(line["one_request_ms"]) == list(line["many_requests_ms"]) == ["1", "2", "4"]
    assert min(line["one_request_ms"].values()) > 0
    assert line["floor_ms"] == pytest.approx(
        1e3 * line["weight_bytes"] / line["stream_bytes_per_s"]
    )
    assert len(heard) == 2 * len(sizes)
    assert line["one_request_over_first"].keys() == line["many_requests_over_one"].keys()
    assert list(line["many_requests_over_one"]) == ["1", "2", "4"]


def test_ratios_are_those_of_a_turn(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def turns(runs: Mapping[tuple[str, int], object], *_: int, warmup: int) -> dict[object, object]:
        # three turns of a machine that is half as fast in each as in the one before
        per_token = {"one request": 1.0, "many requests": 1.5, "stream": 0.0}
        return {
            (shape, size): [(2.0 + per_token[shape] * size) * factor for factor in (1.0, 2.0, 4.0)]
            for shape, size in runs
        }

    monkeypatch.setattr(step, "_turns_ms", turns)
    report = measure(llm.target, quantization=None, config=StepConfig(sizes=(1, 2), context=4))
    assert report.one_request_ms == {"1": 6.0, "2": 8.0}
    assert report.one_request_over_first == {"1": 1.0, "2": 4.0 / 3.0}
    assert report.many_requests_over_one == {"1": 3.5 / 3.0, "2": 5.0 / 4.0}
    assert report.first_over_floor == pytest.approx(1.5)


def test_every_path_of_a_prefill_gives_the_same_logits(llm: LLM, model_dir: Path) -> None:
    plain = Target.load(model_dir, dtype=torch.float32, packed=False)
    calls = prefills(llm.target, plain, IDS)
    assert list(calls) == ["ours", "pytorch", "transformers_eager", "transformers_sdpa"]
    expected_TV = Passes(llm.target, num_requests=1, num_positions=8).score(IDS, chunks=[8])
    for _ in range(2):  # none leaves anything behind that changes another
        for call in calls.values():
            torch.testing.assert_close(call(), expected_TV[-1:])


def test_a_prefill_is_timed_where_a_plain_target_is_given(llm: LLM, model_dir: Path) -> None:
    report = measure(
        llm.target,
        quantization=None,
        config=StepConfig(sizes=(1,), context=4, prefill=6, repeats=1, warmup=0),
        plain=Target.load(model_dir, dtype=torch.float32, packed=False),
    )
    assert report.prefill == 6
    assert set(report.prefill_ms) >= {"ours", "pytorch"}
    assert min(report.prefill_ms.values()) > 0


def test_the_default_sizes_are_those_of_the_contract() -> None:
    assert StepConfig().sizes == (1, 2, 4, 8, 16, 32, 64, 128)
    assert StepConfig().context == 256


def test_streamed_bytes_leave_out_an_embedding_that_is_not_the_head(llm: LLM) -> None:
    total = sum(p.numel() * p.element_size() for p in llm.target.model.parameters())
    embedding = llm.target.embed_weight_VD.nbytes
    packed = {
        m.packed.data_ptr(): m.packed.nbytes
        for m in llm.target.model.modules()
        if hasattr(m, "packed")
    }
    weights = sum(packed.values())
    streamed = streamed_bytes(llm.target)
    assert weights <= streamed < total + weights
    assert streamed < weights + embedding


@pytest.mark.parametrize("changes", [{"sizes": ()}, {"context": 0}, {"prefill": 0}, {"repeats": 0}])
def test_impossible_measurements_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        StepConfig(**changes)
