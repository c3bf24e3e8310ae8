"""The adaptors that run in this environment, here; the others need their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from dspark.benchmarks import peer_process
from dspark.errors import ModelError

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def _ours(model_dir: Path, drafter: Path | None) -> dict[str, object]:
    return {
        "engine": "dspark",
        "model": str(model_dir),
        "drafter": None if drafter is None else str(drafter),
        "dtype": "fp32",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "compile": False,
        "policy": "fixed",
        "max_requests": 2,
        "max_positions": 64,
    }


def test_ours_gives_the_same_ids_drafted_plain_alone_and_together(
    model_dir: Path, drafter_dir: Path
) -> None:
    plain = peer_process.build(_ours(model_dir, None))
    drafted = peer_process.build(_ours(model_dir, drafter_dir))
    together = [list(ids) for ids in plain(PROMPTS, 6)]
    assert [len(ids) for ids in together] == [6, 6]
    assert [list(ids) for ids in drafted(PROMPTS, 6)] == together
    assert [list(plain([prompt], 6)[0]) for prompt in PROMPTS] == together


def test_a_missing_drafter_is_refused_rather_than_timed_plain(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="none"):
        peer_process.build(_ours(model_dir, tmp_path / "none"))


@pytest.mark.parametrize("lookup", [None, 2])
def test_transformers_gives_every_prompt_its_tokens(model_dir: Path, lookup: int | None) -> None:
    settings = {"engine": "transformers", "model": str(model_dir), "num_threads": 1}
    generate = peer_process.build({**settings, "lookup": lookup})
    batches = [PROMPTS] if lookup is None else [[prompt] for prompt in PROMPTS]
    found = [list(ids) for batch in batches for ids in generate(batch, 6)]
    assert [len(ids) for ids in found] == [6, 6]
    assert max(max(ids) for ids in found) < 304


def test_it_stands_alone() -> None:
    """Another engine's Python has neither dspark nor our packages: nothing but the engine's own
    modules and the standard library may be imported before it."""
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(peer_process.__file__).parent)!r})\n"
        "import peer_process\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not names & {'dspark', 'torch', 'numpy'}, names\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
