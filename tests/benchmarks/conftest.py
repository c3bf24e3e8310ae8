"""The toy LLM in an engine of its own, for the tests of this folder."""

import pytest

from dspark.llm import LLM


@pytest.fixture(scope="module")
def llm(toy_llm: LLM) -> LLM:
    return toy_llm.with_policy("fixed")
