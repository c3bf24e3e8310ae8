"""What this machine is, and which versions of packages it has. It measures nothing."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, `None` if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Name of the GPU, or else of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
