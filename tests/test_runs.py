"""The scripts in runs/: one runs whole at toy size, all of them parse and name real options."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.data.answers import read_answers
from dspark.llm import LLM
from tests.toy_answers import write_answers

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "runs").glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_parses_and_can_be_started(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    bare = subprocess.run(["bash", script], capture_output=True, text=True)
    assert bare.returncode != 0  # it says which argument is missing, and does nothing
    assert "line" in bare.stderr


@pytest.mark.slow
def test_the_gpu_script_leaves_a_drafter_within_its_minutes(
    model_dir: Path, tmp_path: Path
) -> None:
    """At toy size on a CPU: answers, training, files of at most 16 MB; and it goes on."""
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"id": f"p{n}", "turns": [f"say {n}"]} for n in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        **os.environ,
        "DSPARK": f"{sys.executable} -m dspark",
        "PYTHONPATH": str(ROOT / "src"),
        "TARGET": str(model_dir),
        "RECIPE": "",
        "PREPARE": "--dtype fp32 --eager --max-new-tokens 12 --concurrency 4",
        "TRAIN": "--dtype fp32 --eager --num-layers 1 --block-size 2 --markov-rank 4 "
        "--draft-vocab-size 64 --num-held-out 2 --answers-per-step 2 --validate-every 2",
    }
    command = ["bash", ROOT / "runs/smollm2_gpu.sh", prompts, "0.02", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "files of weights" in done.stdout
    answers = read_answers(folder / "answers.jsonl")
    assert len({answer.id for answer in answers}) == len(answers) > 4
    for file in (folder / "drafter").iterdir():
        assert file.stat().st_size <= 16_000_000
    llm = LLM.load(
        model_dir, drafter=folder / "drafter", dtype="fp32", compile=False, policy="fixed"
    )
    assert llm.block_size == 2


@pytest.mark.slow
def test_the_baselines_script_makes_its_table_and_goes_on(model_dir: Path, tmp_path: Path) -> None:
    """At toy size on a CPU: three kinds on the same answers, one shared cache, one table."""
    answers = write_answers(tmp_path / "answers.jsonl", domain="chat")
    folder = tmp_path / "out"
    (tmp_path / "toy.jsonl").write_text(json.dumps({"turns": ["say 1"]}) + "\n")
    environment = {
        **os.environ,
        "DSPARK": f"{sys.executable} -m dspark",
        "PYTHONPATH": str(ROOT / "src"),
        "TARGET": str(model_dir),
        "RECIPE": "",
        "ROWS": "dspark mtp chat-2",
        "TASKS": "toy",
        "TRAIN": "--dtype fp32 --eager "
        "--draft-vocab-size 64 --num-held-out 2 --answers-per-step 2 --validate-every 2",
        "EVALUATE": "--dtype fp32 --eager --max-new-tokens 12",
    }
    command = ["bash", ROOT / "runs/smollm2_baselines.sh", answers, tmp_path, "2", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = [line.split("\t") for line in (folder / "table.tsv").read_text().splitlines()]
    assert sorted(row for row, _, _ in table) == ["chat-2", "dspark", "mtp"]
    assert all(float(tau) >= 1.0 and int(step) <= 2 for _, tau, step in table)
    assert (folder / "dspark-work/states").resolve() == (folder / "states").resolve()
    assert len((folder / "states/index.jsonl").read_text().splitlines()) == 12
    assert "mtp" in done.stdout
    (folder / "chat-2.json").unlink()  # as after a kill: this row alone is made again
    before = (folder / "mtp.json").stat().st_mtime_ns
    again = {**environment, "EVALUATE": "no"}
    done = subprocess.run(command, env=again, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "mtp.json").stat().st_mtime_ns == before
    assert (folder / "chat-2.json").exists()
