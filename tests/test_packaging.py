"""What is installed from a checkout answers as the checkout does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_an_installed_package_finds_the_shipped_drafter(tmp_path: Path) -> None:
    """Without it every command decoded plainly, and nothing said so."""
    build = (sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path))
    done = subprocess.run(
        [*build, "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    asked = "from dspark.llm import shipped_drafter; print(shipped_drafter('smollm2-135m'))"
    found = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
    )
    folder = tmp_path / "lib/dspark/drafters/smollm2-135m"
    assert found.stdout.strip() == str(folder), found.stderr
    shipped = ROOT / "drafters/smollm2-135m"
    assert {f.name: f.stat().st_size for f in folder.iterdir()} == {
        f.name: f.stat().st_size for f in shipped.iterdir()
    }


def test_the_public_names_are_imported_when_they_are_asked_for() -> None:
    """`dspark --help` imports the package too, and must not wait for PyTorch."""
    program = (
        "import sys, dspark\n"
        "assert 'torch' not in sys.modules\n"
        "from dspark import LLM, SamplingParams\n"
        "from dspark.core import SamplingParams as other\n"
        "assert SamplingParams is other and callable(LLM.load)\n"
        "assert {*dspark.__all__} <= {*dir(dspark)}\n"
        "assert not hasattr(dspark, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
