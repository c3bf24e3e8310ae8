"""`dspark bench serve` as it is typed."""

import json
from pathlib import Path

from typer.testing import CliRunner

from dspark.cli import app
from dspark.errors import ServerFault
from tests.benchmarks.serve.test_serve import USAGE, chunk, streaming

QUICK = ("--model", "m", "--seconds", "0.2", "--warmup-seconds", "0.02", "--json")


def test_points_are_printed_kept_and_drawn(tmp_path: Path) -> None:
    files = ("--results", str(tmp_path / "points.jsonl"), "--plot", str(tmp_path / "a.png"))
    loads = ("--concurrency", "1,2", "--rates", "30")
    with streaming(chunk("ab"), chunk("c"), USAGE, "data: [DONE]") as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, *QUICK, *loads, *files])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["url"] == url
    assert [point["concurrency"] for point in found["points"]] == [1, 2, None]
    assert all(point["errors"] == 0 for point in found["points"])
    assert (tmp_path / "a.png").is_file()
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 4


def test_a_load_that_failed_ends_with_code_1() -> None:
    with streaming("sorry", status=500) as url:
        done = CliRunner().invoke(
            app, ["bench", "serve", "--url", url, *QUICK, "--concurrency", "1"]
        )
    assert done.exit_code == 1
    assert isinstance(done.exception, ServerFault)
    assert json.loads(done.stdout.strip().splitlines()[-1])["points"][0]["tokens_per_s"] is None
