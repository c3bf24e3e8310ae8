"""Where a target comes from: a name, a directory or a file, read into a model in memory.

It leaves what transformers loads as it is.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dspark.errors import ModelError, first_line
from dspark.models import attention, embedded, gguf, hub
from dspark.models.target_spec import refuse_unsupported


def resolve_source(source: str | Path) -> str:
    """What transformers can load: a directory, or a hub name left as it is.

    Raises `ModelError` for a path that does not exist, and for a name while the hub is out of
    reach.
    """
    text = str(source)
    if not text.strip():
        raise ModelError("The target's name is empty; give a directory, GGUF file or hub name.")
    if embedded.is_embedded(text):
        return str(embedded.embedded_target(text))
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf":
        return str(gguf.converted(path))
    if path.is_dir():
        if (path / "adapter_config.json").is_file():  # transformers would apply it in silence
            raise ModelError(
                f"Directory {path} holds an adapter (LoRA); merge it into its model, save the "
                "result and give that, for a drafter follows one set of weights."
            )
        if not (path / "config.json").is_file():
            raise ModelError(f"Directory {path} has no config.json; give a Hugging Face model.")
        return str(path)
    if path.is_file():
        raise ModelError(
            f"Target {text} is a file, but not a .gguf; give a directory, GGUF file or hub name."
        )
    if (
        path.is_absolute()
        or text.startswith((".", "~"))
        or text.count("/") > 1
        or text.endswith("/")
    ):
        raise ModelError(f"Target {text} does not exist; give a directory, GGUF file or hub name.")
    if hub.is_out_of_reach(text):
        raise ModelError(
            f"Target {text} is no directory here, and {hub.endpoint()} cannot be reached; give a "
            "directory or a GGUF file, or try again when there is a network."
        )
    return text


def load_model(
    source: str | Path, *, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """A whole model on the CPU, its attention the paged one.

    Raises `ModelError` for one that is missing, unreadable, incomplete or unsupported.
    """
    folder = resolve_source(source)
    config = _config(folder, trust_remote_code=trust_remote_code)
    refuse_unsupported(config)
    attention.register()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"Target {source} cannot be loaded: {first_line(error)}.") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
    if report["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f"Target {source} lacks {len(missing)} weights of its architecture, among them "
            f"{missing[0]}; give the directory of a complete model, not of a drafter."
        )
    loaded: PreTrainedModel = model
    return loaded


def _config(folder: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        remedy = "" if Path(folder).is_dir() else "; give a directory, or a name that is reachable"
        raise ModelError(f"Target {folder} cannot be read: {first_line(error)}{remedy}.") from error
