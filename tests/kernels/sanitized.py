"""Runs the operator tests on a library built with sanitizers: `make sanitize`.

python -m dspark.kernels.build --sanitize --output build/sanitize/_ops.so
LD_PRELOAD=libasan.so python tests/kernels/sanitized.py build/sanitize/_ops.so
"""

import sys
from pathlib import Path

import pytest
import torch


def main() -> int:
    """Load the library before the package would load its own, then run the tests beside it."""
    torch.ops.load_library(sys.argv[1])
    return pytest.main(["-q", "-p", "no:cacheprovider", str(Path(__file__).parent)])


if __name__ == "__main__":
    sys.exit(main())
