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
