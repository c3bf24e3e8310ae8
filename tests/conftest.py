"""A toy model on disk, for everything that starts from a path."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import LlamaConfig, LlamaForCausalLM

from dspark import artifacts
from dspark.llm import LLM
from dspark.models.checkpoint import Provenance, save_drafter, target_fingerprint
from dspark.models.target import Target
from dspark.text.tokenizer import Tokenizer
from tests.command_line import Run, runner
from tests.toy_text import save_byte_level
from tests.toys import toy_drafter

# No test depends on the clock, and a machine that others share may stand still for a second.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_artifacts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Step costs of toys stay out of the user's cache; each is measured once a session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "default_cache", lambda: folder)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 2 layers with a byte-level tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # flat logits would tie in low precision
    model.save_pretrained(path)
    save_byte_level(path)
    return path


@pytest.fixture(scope="session")
def drafter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter for it."""
    path = tmp_path_factory.mktemp("drafters") / "random"
    target = Target.load(model_dir, dtype=torch.float32, packed=False)
    provenance = Provenance(
        target_name=target.spec.name,
        target_fingerprint=target_fingerprint(target.embed_weight_VD),
        target_dtype="float32",
        template_hash=Tokenizer.load(model_dir).template_hash,
    )
    save_drafter(
        toy_drafter(target, mask_token_id=303, max_position_embeddings=1024),
        path,
        provenance=provenance,
    )
    return path


@pytest.fixture(scope="session")
def toy_llm(model_dir: Path, drafter_dir: Path) -> LLM:
    """Both, in float32, with whole blocks verified; take `with_config` for an engine of its own."""
    return LLM.load(
        model_dir, drafter=drafter_dir, dtype="fp32", device="cpu", compile=False, policy="fixed"
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`dspark` as a person types it."""
    return runner(monkeypatch, capsys)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gguf", action="append", default=[], help="a GGUF file of a real target")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gguf_path" in metafunc.fixturenames:
        files = [Path(name) for name in metafunc.config.getoption("--gguf")]
        skip = pytest.mark.skip(reason="no GGUF file was named: --gguf PATH")
        values = files or [pytest.param(None, marks=skip)]
        metafunc.parametrize("gguf_path", values, ids=[f.name for f in files] or ["none"])
