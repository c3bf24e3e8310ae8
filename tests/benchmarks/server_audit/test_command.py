"""`dspark audit` as it is typed."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dspark.cli import app
from dspark.errors import DSparkError
from tests.toy_server import Fault, ToyServer, served

QUICK = (
    *("--temperature", "0", "--greedy-tokens", "20", "--limit", "3"),
    *("--top-logprobs", "6", "--concurrency", "2", "--json"),
)


def run(url: str, *more: str) -> Result:
    return CliRunner().invoke(app, ["audit", "--url", url, *QUICK, *more])


def test_a_lossless_server_ends_with_code_0_and_one_line(tmp_path: Path) -> None:
    prompts = tmp_path / "share.json"
    prompts.write_text(json.dumps([{"conversations": [{"from": "human", "value": "Hi"}]}]))
    with served(ToyServer()) as url:
        done = run(url, "--prompts", str(prompts))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["lossless"], found["temperature"], found["model"]) == (True, 0.0, "toy")


def test_a_loss_is_an_error_that_says_what_failed() -> None:
    with served(ToyServer(fault=Fault.NO_PENALTY)) as wrong, served(ToyServer()) as right:
        done = run(wrong, "--reference", right)
    assert done.exit_code == 1
    assert isinstance(done.exception, DSparkError)
    assert "NOT lossless. Failed: T=0 penalties" in str(done.exception)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["lossless"] is False
    assert found["reference"] == right


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    done = run("http://127.0.0.1:9")
    assert done.exit_code == 1
    with pytest.raises(DSparkError, match="connection refused"):
        raise done.exception or AssertionError
