"""The toy tokenizers, saved once and loaded like a model's own."""

from pathlib import Path

import pytest

from dspark.text.tokenizer import Tokenizer
from tests.toy_text import save_byte_level, save_sentencepiece


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("byte-level")
    save_byte_level(path)
    return path


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_dir)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece(path)
    return Tokenizer.load(path)


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    loaded: Tokenizer = request.getfixturevalue(request.param)
    return loaded
