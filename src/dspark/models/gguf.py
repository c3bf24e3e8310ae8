"""GGUF files turned once into plain Hugging Face directories. Knows no model family.

transformers reads GGUF weights but takes many seconds to dequantise them and refuses to save
the result; so the state is copied into a fresh model, saved once, and loaded from there.
"""

import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dspark.errors import CapacityError, ModelError

_FORMAT = 1  # raise when the conversion changes, so that old copies are left alone


def default_cache() -> Path:
    """Where converted targets and compiled code are kept between runs."""
    return Path.home() / ".cache" / "dspark"


def converted(path: Path, *, cache: Path | None = None) -> Path:
    """The Hugging Face directory of a GGUF file, made on the first call.

    The copy holds float32 weights of the dequantised model and is keyed by the file's name,
    size and a hash of its ends, so that a replaced file is converted again.

    Raises `ModelError` for a missing or unreadable file, `CapacityError` when the disk is full.
    """
    if not path.is_file():
        raise ModelError(f"GGUF file {path} does not exist; give the path of a .gguf file.")
    target = (cache or default_cache()) / "targets" / f"{path.stem.lower()}-{_fingerprint(path)}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        _convert(path, scratch)
        os.replace(scratch, target)  # noqa: PTH105 (atomic on one file system)
    except OSError as error:
        if (target / "config.json").is_file():  # another process was faster
            return target
        raise CapacityError(
            f"The converted copy of {path.name} could not be written to {target.parent}: "
            f"{error.strerror or error}; free space there and run again."
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT}:{size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:12]


def _convert(path: Path, scratch: Path) -> None:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder, name = str(path.parent), path.name
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32
            )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"{path} cannot be read as a GGUF causal LM ({error}); "
            "use a file whose architecture transformers can load."
        ) from error
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
    config = AutoConfig.for_model(**_plain_config(loaded.config.to_dict()))
    state = loaded.state_dict()
    _tie_if_equal(config, state)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(state)
    if config.tie_word_embeddings:
        fresh.tie_weights()
    fresh.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)


def _plain_config(config: dict[str, object]) -> dict[str, object]:
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    return config


def _tie_if_equal(config: AutoConfig, state: dict[str, torch.Tensor]) -> None:
    # some GGUF files carry the embedding twice, in two precisions; only equal ones are tied
    embedding, head = state.get("model.embed_tokens.weight"), state.get("lm_head.weight")
    if embedding is not None and head is not None:
        config.tie_word_embeddings = bool(torch.equal(embedding, head))
