"""Compile the C++ operators: `python -m dspark.kernels.build [--sanitize] [--output PATH]`.

It knows the compiler and the sources, not what they compute. `setup.py` runs it by path, before
the package can be imported, so it imports nothing of this package.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils import cpp_extension

SOURCES = Path(__file__).with_name("csrc")

_AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_INSTRUCTIONS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": _AVX512,
    "avx512vnni": [*_AVX512, "-mavx512vnni"],
    "avx512bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
    "amx": [*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
"""Namespace of each instruction set and its compiler flags."""

# No contraction: what is rounded once and what twice is written down in the sources.
_COMMON = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden"]
# GCC 12 warns about `_mm256_undefined_si256` in its own header.
_WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
_SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]


class BuildError(RuntimeError):
    """No compiler is there, or it refuses."""


def build(output: Path, *, is_sanitized: bool = False) -> None:
    """Compile and link the operators to `output`; raises BuildError with the compiler's words."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"The C++ operators are for x86-64, and this is {platform.machine()}.")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("There is no C++ compiler (g++ or clang++).")
    flags = [*_COMMON, *_WARNINGS, *(_SANITIZE if is_sanitized else [])]
    with tempfile.TemporaryDirectory() as folder:
        objects, commands = [], []
        for source in sorted(SOURCES.glob("*.cpp")):
            for name, arguments in _variants(source).items():
                objects.append(Path(folder) / f"{source.stem}.{name}.o")
                commands.append(
                    [compiler, *flags, *arguments, "-c", str(source), "-o", str(objects[-1])]
                )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(_run, commands):
                pass
        unlinked = Path(folder) / output.name
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        libraries += ["-lc10", "-ltorch_cpu", "-ltorch"]
        _run([compiler, *flags, "-shared", *map(str, objects), *libraries, "-o", str(unlinked)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old library loaded keeps it: the new one gets a new inode.
        output.unlink(missing_ok=True)
        shutil.move(unlinked, output)


def _variants(source: Path) -> dict[str, list[str]]:
    """Object names of a source and the flags of each: kernels once per instruction set."""
    if '#include "vector.h"' not in source.read_text():
        return {"any": [f"-isystem{path}" for path in cpp_extension.include_paths()]}
    return {name: [f"-DDSPARK_ISA={name}", *flags] for name, flags in _INSTRUCTIONS.items()}


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stderr}")
    if result.stderr:
        sys.stderr.write(result.stderr)


def main() -> None:
    """Parse the command line, build."""
    parser = argparse.ArgumentParser(description="Build the C++ operators of dspark.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("_ops.so"))
    parser.add_argument("--sanitize", action="store_true", help="address and undefined behaviour")
    arguments = parser.parse_args()
    build(arguments.output, is_sanitized=arguments.sanitize)
    sys.stderr.write(f"built {arguments.output}\n")


if __name__ == "__main__":
    main()
