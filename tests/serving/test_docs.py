"""docs/serving.md lists what the protocol takes, and nothing else."""

import re
from pathlib import Path

from dspark.llm import LLM
from dspark.serving.app import App
from dspark.serving.protocol import ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_every_field_is_documented_and_every_documented_field_is_taken() -> None:
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    table = PAGE.split("## Fields of a request")[1].split("Audio, images")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == fields - {"model"}


def test_every_route_is_documented(llm: LLM) -> None:
    paths = set(App(llm).api.openapi()["paths"])
    named = set(re.findall(r"(?:GET|POST) (/[\w/.]*)", PAGE))
    assert {path.split("/{")[0] for path in paths} - {"/live/crowd"} <= {
        n.rstrip("/") for n in named
    }
