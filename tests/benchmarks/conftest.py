"""One LLM of the toy model on disk with its random drafter, for the tests of this folder."""

from pathlib import Path

import pytest

from dspark.llm import LLM


@pytest.fixture(scope="module")
def llm(model_dir: Path, drafter_dir: Path) -> LLM:
    return LLM.load(model_dir, drafter=drafter_dir, dtype="fp32", compile=False, policy="fixed")
