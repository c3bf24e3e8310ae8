import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from dspark.benchmarks.perplexity import Perplexity, measure, report_of
from dspark.data.answers import Answer
from dspark.errors import InputError
from dspark.llm import LLM


def _answer(prompt: list[int], ids: list[int]) -> Answer:
    return Answer(
        id=str(prompt),
        domain="x",
        temperature=1.0,
        top_p=1.0,
        prompt_token_ids=prompt,
        token_ids=ids,
        finish_reason="length",
        text="",
    )


def test_only_the_answer_s_tokens_count_and_chunks_do_not_matter(
    llm: LLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers' own loss over the same tokens."""
    answers = [_answer([5, 6, 7], list(range(10, 30))), _answer([9], [3, 4])]
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loss, count = 0.0, 0
    for answer in answers:
        with torch.no_grad():
            logits_TV = model(answer.ids()[None]).logits[0].double().log_softmax(-1)
        first = len(answer.prompt_token_ids)
        for position, token in enumerate(answer.token_ids, start=first):
            loss -= float(logits_TV[position - 1, token])
            count += 1
    heard: list[tuple[int, int]] = []
    for chunk in (128, 4):
        monkeypatch.setattr("dspark.benchmarks.perplexity._CHUNK", chunk)
        found = measure(
            llm.target, answers, on_answer=lambda done, total: heard.append((done, total))
        )
        assert found.num_tokens == count == 22
        assert found.perplexity == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert heard == [(1, 2), (2, 2)] * 2


def test_ratios_are_each_over_every_earlier_one() -> None:
    values = {"fp32": 2.0, "bf16": 3.0, "int8": 6.0}
    found = {name: Perplexity(perplexity=value, num_tokens=1) for name, value in values.items()}
    line = json.loads(json.dumps(report_of(found, num_answers=4).to_json()))
    assert line["ratios"] == {"bf16/fp32": 1.5, "int8/fp32": 3.0, "int8/bf16": 2.0}
    assert line["arithmetics"]["int8"] == {"perplexity": 6.0, "num_tokens": 1}
    assert line["answers"] == 4


def test_answers_without_a_token_are_refused(llm: LLM) -> None:
    with pytest.raises(InputError, match="no token"):
        measure(llm.target, [_answer([1, 2], [])])
