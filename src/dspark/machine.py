"""What this machine is, and which versions of packages it has. It measures nothing."""

import os
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


def num_processors() -> int:
    """Processors that this process may keep busy, within the limit of a container."""
    whole = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count for count in (whole, _group_processors(), 2**16) if count is not None)


def _group_processors(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):
        return None  # as for memory
    return max(quota // period, 1)


def free_memory(device: torch.device) -> int | None:
    """Bytes that a program can still take on a device; `None` where the system does not say.

    Of a CPU, what the kernel could give without swapping, within the limit of a container.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [size for size in (_available(), _left_in_group()) if size is not None]
    return min(known, default=None) if device.type == "cpu" else None


def _available() -> int | None:
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_group(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no container, no limit ("max"), or another system
    return max(limit - used + int(files.get("inactive_file", 0)), 0)
