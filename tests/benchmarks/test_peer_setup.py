import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.benchmarks import peer_setup
from dspark.benchmarks.peer_setup import Peer, install, python_of
from dspark.errors import InputError, ModelError


def test_a_peer_without_an_environment_has_no_python(tmp_path: Path) -> None:
    assert python_of("vllm", given={}, folder=tmp_path) is None
    assert peer_setup.install_command("vllm") == "dspark bench peers vllm"


def test_ours_and_transformers_run_here(tmp_path: Path) -> None:
    for family in ("dspark", "transformers"):
        assert python_of(family, given={}, folder=tmp_path) == Path(sys.executable)


def test_a_given_python_wins_and_must_exist(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    assert python_of("vllm", given={"vllm": python}, folder=tmp_path) == python
    with pytest.raises(InputError, match="vllm"):
        python_of("vllm", given={"vllm": tmp_path / "none"}, folder=tmp_path)


def test_an_unknown_peer_cannot_be_installed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'ollama'"):
        install("ollama", folder=tmp_path, say=print)


def test_requirements_are_those_of_the_package_less_the_heavy_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-c", peer_setup._REQUIREMENTS, "typer", "rich", "shellingham"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = done.stdout.split()
    assert any(name.startswith("annotated-doc") for name in names)
    assert not any(name.startswith(("rich", "shellingham")) for name in names)


@pytest.mark.slow
def test_an_environment_is_made_once_and_anew_for_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two small packages on this disk take the place of an engine; all else is real."""
    _write_wheel(tmp_path, "tinyengine", "1.0", ["tinyhelp", "torch", "rich; extra == 'x'"])
    _write_wheel(tmp_path, "tinyhelp", "1.0", [])
    folder, said = tmp_path / "peers", list[str]()

    peer = Peer(
        packages=("tinyengine",),
        pins=(),
        bare="tinyengine==1.0",
        without=("torch",),
        variables={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
    )
    monkeypatch.setattr(peer_setup, "PEERS", {"tiny": peer})
    python = install("tiny", folder=folder, say=said.append)
    assert python == folder / "tiny" / "bin" / "python"
    assert python_of("tiny", given={}, folder=folder) == python
    assert _versions(python) == "1.0 1.0"
    assert len(said) == 2
    assert install("tiny", folder=folder, say=said.append) == python
    assert len(said) == 2
    monkeypatch.setattr(peer_setup, "PEERS", {"tiny": replace(peer, bare="tinyengine==2.0")})
    monkeypatch.setattr(peer_setup.sys, "executable", "/bin/false")  # a second one takes seconds
    with pytest.raises(ModelError, match="exit code 1"):  # and the old one is gone
        install("tiny", folder=folder, say=said.append)
    assert python_of("tiny", given={}, folder=folder) is None


def test_a_step_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer_setup.sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"exit code 1"):
        install("vllm", folder=tmp_path, say=print)
    assert python_of("vllm", given={}, folder=tmp_path) is None


def _write_wheel(folder: Path, name: str, version: str, requirements: Sequence[str]) -> None:
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requirements)]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def _versions(python: Path) -> str:
    program = (
        "from importlib.metadata import version; print(version('tinyengine'), version('tinyhelp'))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()
