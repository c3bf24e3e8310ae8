"""Engine and server in turn around a toy model: both say the same, and the report has its keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark.benchmarks.overhead.config import OverheadConfig
from dspark.benchmarks.overhead.overhead import measure
from dspark.cli import app
from dspark.engine.cycle import CycleConfig
from dspark.errors import InputError, ServerFault
from dspark.llm import LLM

CHATS: list[list[Mapping[str, str]]] = [
    [{"role": "user", "content": f"Hello {number}"}] for number in range(3)
]
SMALL: dict[str, Any] = {"users": 2, "answers": 6, "max_new_tokens": 5, "first_tokens": 2}


def in_engine(toy_llm: LLM, num_positions: int = 512) -> LLM:
    return toy_llm.with_config(
        CycleConfig(max_requests=2, num_positions=num_positions, prefix_cache=False)
    )


def test_both_sides_give_the_same_answers(toy_llm: LLM) -> None:
    config = OverheadConfig(**SMALL, rounds=2)
    heard: list[tuple[int, str]] = []
    report = measure(
        in_engine(toy_llm),
        CHATS,
        config,
        on_round=lambda number, side, _: heard.append((number, side)),
    )
    assert heard == [(0, "engine"), (0, "server"), (1, "server"), (1, "engine")]
    assert len({taken.all_tokens for taken in (*report.engine, *report.server)}) == 1
    for taken in (*report.engine, *report.server):
        assert 0 < taken.tokens < taken.all_tokens
        assert taken.steps > 0
        assert taken.seconds > 0.0
    assert report.server_first_ms > 0.0
    assert report.first_token_ratio == pytest.approx(
        report.server_first_ms / report.engine_first_ms
    )


def test_a_server_that_refuses_is_no_slow_server(toy_llm: LLM) -> None:
    config = OverheadConfig(**{**SMALL, "max_new_tokens": 40}, rounds=1)
    chats = [[{"role": "user", "content": "long " * 400}]]
    with pytest.raises((ServerFault, InputError)):
        measure(in_engine(toy_llm, num_positions=128), chats, config)


def test_the_command_prints_both_ratios(model_dir: Path, drafter_dir: Path) -> None:
    options = ["--users", "2", "--answers", "4", "--max-new-tokens", "4", "--first-tokens", "1"]
    model = ["--target", str(model_dir), "--drafter", str(drafter_dir), "--dtype", "fp32"]
    done = CliRunner().invoke(
        app,
        ["bench", "overhead", *options, *model, "--eager", "--policy", "fixed", "--rounds", "1"],
    )
    assert done.exit_code == 0, done.output
    assert "2 users, 4 answers, fixed policy: server" in done.stdout
    assert "first token of one user" in done.stdout
    done = CliRunner().invoke(
        app,
        [
            *("bench", "overhead", *options, *model, "--eager", "--policy", "fixed"),
            *("--rounds", "1", "--json"),
        ],
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"throughput_ratio", "first_token_ratio", "engine", "server"} <= set(found)
    assert set(found["server"][0]) >= {"seconds", "tokens", "steps", "tokens_per_s"}


def test_users_need_something_to_ask_twice() -> None:
    with pytest.raises(InputError, match="at least two each"):
        OverheadConfig(users=4, answers=7)
    with pytest.raises(InputError, match="rounds is 0"):
        OverheadConfig(rounds=0)
