"""The routes over a real socket: answers, streams, refusals."""

import json

import httpx
import pytest

from dspark.llm import LLM
from tests.algorithms.test_cost_faults import one_row
from tests.algorithms.toy_costs import curve
from tests.serving.conftest import serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}


def events(text: str) -> list:
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(line) if line != "[DONE]" else line for line in data]


def test_a_stream_joined_is_the_whole_answer(client: httpx.Client) -> None:
    body = {**CHAT, "ignore_eos": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    usage = {"include_usage": True}
    stream = client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": usage}
    )
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events(stream.text)
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    usages = [found[-2]["usage"], whole["usage"]]
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages]
    assert usages[0] == usages[1]
    assert 0 <= cached[1] <= cached[0] < usages[0]["prompt_tokens"]  # the second finds the first's
    assert whole["usage"]["completion_tokens"] == 12
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-2]]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert found[-3]["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["finish_reason"] == "length"


def test_the_model_is_listed(client: httpx.Client) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "toy"
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").status_code == 200


def test_a_server_without_useful_costs_does_not_call_itself_adaptive(loaded: LLM) -> None:
    """UC-135: verifying whole blocks is what it does, and what the metrics say."""
    llm = loaded.with_policy("auto")
    llm._step_cost = one_row(curve((4,), lambda n: 1.0))
    with (
        pytest.warns(UserWarning, match="Verifying whole blocks, for the step costs are of no use"),
        serving(llm) as (_, url, _),
    ):
        text = httpx.get(f"{url}/metrics").text
    assert 'dspark_policy_info{policy="fixed, no cost table"} 1.0' in text
