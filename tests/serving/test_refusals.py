"""What is not served is refused, and the refusal names the field."""

from typing import Any

import httpx
import pytest

from dspark.errors import InputError
from dspark.serving.app import AppConfig
from dspark.serving.refusals import named_field

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}


def image(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),  # UC-033
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),  # beside max_tokens 2
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 3}, "min_tokens"),  # above max_tokens
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": -1}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"304": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"nothing": True}}, "stream_options.nothing"),
    ({"speculation": {"max_draft": 5}}, "speculation.max_draft"),
    ({"speculation": {"width": 5}}, "speculation.width"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "Hello"}]}, "messages[0].role"),
    ({"messages": [image("x")]}, "messages[0].content[0].image_url"),  # UC-160
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs.enable_thinking",
    ),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"store": True}, "store"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),  # UC-039
]


@pytest.mark.parametrize(("changes", "param"), BAD_CHATS, ids=lambda value: str(value))
def test_a_field_that_is_not_served_is_named(
    client: httpx.Client, changes: dict[str, Any], param: str | None
) -> None:
    reply = client.post("/v1/chat/completions", json={**CHAT, **changes})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert next(iter(changes)).split("_")[0] in error["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1, 2], "x"]}, "prompt[1]"),
        ({"prompt": [1, 304]}, "prompt"),
        ({"prompt": [-1, 3]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a" * 3000}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": CHAT["messages"]}, "messages"),
    ],
    ids=lambda value: str(value),
)
def test_completions_too(client: httpx.Client, changes: dict[str, Any], param: str | None) -> None:
    reply = client.post("/v1/completions", json={**TEXT, **changes})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text


def test_a_list_of_the_wrong_length_is_one_sentence(client: httpx.Client) -> None:
    for changes, words in (
        ({"messages": []}, "messages holds 0 items, but it must hold at least 1."),
        ({"stop": ["x"] * 17}, "stop holds 17 items, but it must hold at most 16."),
    ):
        reply = client.post("/v1/chat/completions", json={**CHAT, **changes})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"served_name": ""}, "served_name is empty"),
        ({"api_key": ""}, "api_key must be a word"),
        ({"cors_origins": ("example.org",)}, "cors_origin is 'example.org', but it must be an"),
    ],
)
def test_a_server_that_nobody_could_use_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        AppConfig(**options)


def test_numbers_that_json_does_not_know_are_refused(client: httpx.Client) -> None:
    body = b'{"prompt": "Hello", "temperature": NaN}'
    reply = client.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"


def test_several_fields_are_listed_in_one_refusal(client: httpx.Client) -> None:
    """UC-039."""
    reply = client.post("/v1/chat/completions", json={**CHAT, "audio": {}, "echo": True})
    message = reply.json()["error"]["message"]
    assert "audio" in message
    assert "echo" in message
    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        (
            "chat/completions",
            {"stop": 3},
            "stop is 3, but it must be a valid string or a valid list.",
        ),
        ("chat/completions", {"logprobs": "x"}, "logprobs is 'x', but it must be a valid boolean."),
        (
            "completions",
            {"prompt": None},
            "prompt is null, but it must be a valid string or a valid l",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is missing, but type is 'json_schema'.",
        ),
    ],
)
def test_a_value_is_named_once_with_all_that_it_may_be(
    client: httpx.Client, path: str, changes: dict[str, Any], words: str
) -> None:
    reply = client.post(
        f"/v1/{path}", json={**(TEXT if path == "completions" else CHAT), **changes}
    )
    assert reply.json()["error"]["message"].startswith(words), reply.text


def test_no_thoughts_are_what_a_template_without_them_gives(client: httpx.Client) -> None:
    body = {**CHAT, "temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    plain = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0})
    assert reply.json()["choices"] == plain.json()["choices"]


def test_what_asks_for_nothing_is_taken(client: httpx.Client) -> None:
    harmless = {
        "store": False,
        "best_of": 1,
        "echo": None,
        "audio": None,
        "tools": [],
        "tool_choice": "none",
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
    }
    assert client.post("/v1/chat/completions", json={**CHAT, **harmless}).status_code == 200


@pytest.mark.parametrize(
    "content", [b"{", b"", b"[1]", b'"text"', b"\xff\xfe", b'{"prompt": "\\ud800"}']
)
def test_a_body_that_is_no_request_is_refused(client: httpx.Client, content: bytes) -> None:
    reply = client.post(
        "/v1/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].endswith(".")
    assert not (error["param"] or "").startswith("[")  # a position in the text is no field


def test_a_body_of_another_type_is_refused(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", content=b'{"prompt": "x"}')
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_the_context_is_told_in_numbers(client: httpx.Client) -> None:
    long = client.post("/v1/completions", json={"prompt": [5] * 2000})
    assert long.status_code == 400
    error = long.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]
    assert "2000" in error["message"]
    both = client.post("/v1/completions", json={"prompt": [5] * 1000, "max_tokens": 100})
    assert "1000" in both.json()["error"]["message"]
    assert "100;" in both.json()["error"]["message"]
    fits = client.post("/v1/completions", json={"prompt": [5] * 1000, "max_tokens": 24})
    assert fits.status_code == 200


def test_another_model_is_not_found(client: httpx.Client) -> None:
    for reply in (
        client.post("/v1/completions", json={**TEXT, "model": "gpt-x"}),
        client.get("/v1/models/gpt-x"),
    ):
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"
    assert client.get("/v1/models/toy").json()["id"] == "toy"


def test_paths_and_methods_that_are_not_there(client: httpx.Client) -> None:
    assert client.get("/v1/nothing").status_code == 404
    error = client.get("/v1/nothing").json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("There is no '/v1/nothing' here; GET /openapi.json")
    reply = client.get("/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    assert reply.json()["error"]["message"] == "GET is not for '/v1/completions'; use POST."
    assert client.post("/tokenize", json={}).status_code == 404  # no name of the page's


def test_the_field_of_a_sentence() -> None:
    assert named_field("top_p is 2, but it must lie in (0, 1].") == "top_p"
    assert named_field("logit_bias[3] is nan, but it must be valid.") == "logit_bias"
    assert named_field("The prompt is empty.") is None
