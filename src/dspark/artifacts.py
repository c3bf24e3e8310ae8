"""Files that the engine's decisions rest on: step costs of this machine, calibration of a drafter.

Step costs lie in the cache, found by what they were measured on; a calibration lies beside its
drafter and travels with it. It measures nothing.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from dspark.algorithms.calibration import Calibration
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import StepCost
from dspark.engine import profiler
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.engine.prompt_lookup import PromptLookup
from dspark.errors import InputError, ModelError
from dspark.kernels import extension
from dspark.machine import installed_version, processor
from dspark.models.gguf import default_cache
from dspark.models.target import Target

CALIBRATION = "calibration.json"


def fingerprint_of(
    target: Target, drafter: DraftSource, *, quantization: str | None
) -> Fingerprint:
    """All that a step's seconds depend on: models by their shape, arithmetic, machine, versions."""
    shape = drafter if isinstance(drafter, PromptLookup) else drafter.config
    return Fingerprint.of(
        target=target.spec.name,
        layers=target.spec.num_layers,
        hidden_size=target.spec.hidden_size,
        drafter=hashlib.sha256(repr(shape).encode()).hexdigest()[:12],
        block_size=block_size_of(drafter),
        dtype=str(target.dtype).removeprefix("torch."),
        quantization=quantization or "none",
        keys_and_values=str(target.kv_dtype).removeprefix("torch."),
        device=target.device.type,
        processor=processor(),
        threads=torch.get_num_threads(),
        kernels="native" if extension.IS_LOADED else "torch",
        profiler=profiler.REVISION,
        torch=torch.__version__,
        dspark=installed_version("dspark") or "not installed",
    )


def step_cost_path(fingerprint: Fingerprint) -> Path:
    """Where step costs with this fingerprint are kept."""
    key = json.dumps(fingerprint.to_json(), sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return default_cache() / "step_costs" / name / "step_cost.json"


def stored_step_cost(fingerprint: Fingerprint, *, max_requests: int) -> StepCost | None:
    """The table measured here before, `None` if none reaches so far or it cannot be read."""
    path = step_cost_path(fingerprint)
    if not path.is_file():
        return None
    try:
        cost = read_step_cost(path)
        cost.fingerprint.require_same(fingerprint)
    except ModelError:
        return None  # it is measured again, and replaced
    return cost if cost.verify[-1].num_requests >= max_requests else None


def read_step_cost(path: Path) -> StepCost:
    """A table of `dspark profile`. Raises `ModelError` for anything else."""
    return StepCost.from_json(read_object(path))


def store_step_cost(cost: StepCost, path: Path | None = None) -> Path:
    """Keep a table, under its fingerprint if no path is given."""
    path = step_cost_path(cost.fingerprint) if path is None else path
    _write(path, cost.to_json())
    return path


def read_calibration(folder: Path) -> Calibration | None:
    """What was fitted for the drafter in this directory, `None` if nothing was."""
    path = folder / CALIBRATION
    return Calibration.from_json(read_object(path)) if path.is_file() else None


def store_calibration(calibration: Calibration, folder: Path) -> Path:
    """Put it beside the drafter."""
    path = folder / CALIBRATION
    _write(path, calibration.to_json())
    return path


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelError` where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; give the path of a file of JSON.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); make it again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object, but a list or a value; make it again.")
    return found


def read_lines(path: Path, *, wanted: str) -> list[str]:
    """Of a text file that the user names; `wanted` says what it should be.

    Raises `InputError` for one that is missing, no file or no text.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; give {wanted}.") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a directory; give {wanted}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} holds no text; give {wanted}.") from error


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
