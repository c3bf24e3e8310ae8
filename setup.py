"""The C++ operators are optional: without PyTorch or a compiler the package installs without them.

The shipped drafters lie beside the sources and go into the package when it is built. Everything
else is in pyproject.toml. PyTorch must be present while this runs, so install with
`pip install --no-build-isolation -e .`.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

DRAFTERS = Path(__file__).parent / "drafters"
BUILD_SCRIPT = Path(__file__).parent / "src" / "dspark" / "kernels" / "build.py"


class BuildOperators(build_ext):
    """Runs `dspark.kernels.build`; a failure is one line, not the end of the installation."""

    def get_ext_filename(self, fullname: str) -> str:
        """A library that PyTorch loads, no Python module: its name carries no Python version."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile to where setuptools wants it, or say why not."""
        try:
            spec = importlib.util.spec_from_file_location("build", BUILD_SCRIPT)
            assert spec is not None
            assert spec.loader is not None
            build = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(build)
            build.build(Path(self.get_ext_fullpath(ext.name)))
        except (ImportError, RuntimeError, OSError) as error:
            sys.stderr.write(f"dspark installs without its C++ operators: {error}\n")


class BuildWithDrafters(build_py):
    """Copies the shipped drafters to where `dspark.llm.shipped_drafter` finds them."""

    def run(self) -> None:
        """Python files first; an editable installation reads the checkout's own drafters."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "dspark" / DRAFTERS.name
            shutil.copytree(DRAFTERS, target, dirs_exist_ok=True)


setup(
    ext_modules=[Extension("dspark.kernels._ops", sources=[], optional=True)],
    cmdclass={"build_ext": BuildOperators, "build_py": BuildWithDrafters},
)
