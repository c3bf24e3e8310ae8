"""The prefix cache measured on the toy model: known words, equal answers."""

from dataclasses import replace

import pytest

from dspark.benchmarks.prefix import PrefixConfig, measure
from dspark.engine.cycle import Cycle
from dspark.errors import InputError
from dspark.llm import LLM

CONFIG = PrefixConfig(requests=4, system_tokens=150, max_new_tokens=6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_known_words_are_counted_and_no_answer_changes(llm: LLM, temperature: float) -> None:
    seen: list[tuple[int, int]] = []
    report = measure(
        llm,
        replace(CONFIG, temperature=temperature),
        on_request=lambda done, total: seen.append((done, total)),
    )
    assert report.identical == report.requests == 4
    assert report.cold_tau == report.warm_tau
    assert 64 <= report.cached_tokens < report.prompt_tokens
    assert report.ratio == report.cold_ttft_ms / report.warm_ttft_ms
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert report.to_json()["ratio"] == report.ratio


def test_an_answer_that_a_hit_changes_is_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: who finds known words is answered from another seed."""
    honest = Cycle.submit

    def faulty(self: Cycle, request):  # type: ignore[no-untyped-def]
        if self.config.prefix_cache:
            request = replace(request, params=replace(request.params, seed=99))
        honest(self, request)

    monkeypatch.setattr(Cycle, "submit", faulty)
    assert measure(llm, replace(CONFIG, temperature=1.0)).identical < 4


def test_nothing_to_ask_is_refused() -> None:
    with pytest.raises(InputError, match="requests is 0"):
        PrefixConfig(requests=0)
