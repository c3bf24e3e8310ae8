"""The official client against a live server: every documented feature."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from dspark.core import SamplingParams
from dspark.llm import LLM
from dspark.serving.app import App

HELLO: Any = [{"role": "user", "content": "Hello"}]
SIZE = {"max_tokens": 16}
WHOLE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def api(live: tuple[App, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live[1]}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def reference(loaded: LLM) -> LLM:
    return loaded.with_policy("none")


def test_models(api: OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["toy"]
    assert api.models.retrieve("toy").owned_by == "dspark"
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("other")


def test_a_chat_equals_the_engine_s_own_answer(api: OpenAI, reference: LLM) -> None:
    found = api.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, **SIZE, extra_body=WHOLE
    )
    (expected,) = reference.generate(
        [HELLO], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    )
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 16
    assert found.usage.prompt_tokens == len(expected.prompt_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + 16
    assert found.id.startswith("chatcmpl-")
    assert found._request_id


def test_parts_of_text_and_developer_messages(api: OpenAI) -> None:
    as_text: Any = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello there"},
    ]
    as_parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}],
        },
    ]
    answers = [
        api.chat.completions.create(model="toy", messages=m, temperature=0, **SIZE)
        for m in (as_text, as_parts)
    ]
    assert answers[0].choices == answers[1].choices


def test_a_conversation_goes_on_with_the_message_as_it_came(api: OpenAI) -> None:
    first = api.chat.completions.create(model="toy", messages=HELLO, **SIZE)
    messages: Any = [*HELLO, first.choices[0].message, {"role": "user", "content": "More"}]
    assert api.chat.completions.create(model="toy", messages=messages, **SIZE).choices


def test_a_stream_is_the_same_answer(api: OpenAI) -> None:
    options: Any = {"model": "toy", "messages": HELLO, "temperature": 0, "extra_body": WHOLE}
    whole = api.chat.completions.create(**options, max_completion_tokens=16)
    chunks = list(
        api.chat.completions.create(
            **options,
            max_completion_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_usage_tells_what_drafts_brought(api: OpenAI) -> None:
    found = api.chat.completions.create(
        model="toy", messages=HELLO, temperature=0, max_tokens=64, extra_body=WHOLE
    )
    details = found.usage.completion_tokens_details
    ours = found.usage.model_extra["speculation"]
    assert ours["accepted_tokens"] == details.accepted_prediction_tokens
    assert ours["verified_tokens"] == (
        details.accepted_prediction_tokens + details.rejected_prediction_tokens
    )
    assert ours["drafted_tokens"] >= ours["verified_tokens"] > 0
    assert ours["rounds"] + ours["accepted_tokens"] + 1 >= 64
    plain = api.chat.completions.create(
        model="toy",
        messages=HELLO,
        temperature=0,
        max_tokens=64,
        extra_body={**WHOLE, "speculation": {"max_draft": 0}},
    )
    assert plain.choices[0].message.content == found.choices[0].message.content
    assert plain.usage.model_extra["speculation"]["drafted_tokens"] == 0  # UC-066
    assert plain.usage.prompt_tokens_details.cached_tokens > 0


def test_every_max_draft_gives_the_same_greedy_text(api: OpenAI) -> None:
    """UC-060."""
    texts = {
        api.completions.create(
            model="toy",
            prompt="the end",
            temperature=0,
            max_tokens=40,
            extra_body={**WHOLE, "speculation": {"max_draft": width}},
        )
        .choices[0]
        .text
        for width in range(5)
    }
    assert len(texts) == 1


def test_n_answers(api: OpenAI) -> None:
    """UC-040."""
    warm = api.chat.completions.create(model="toy", messages=HELLO, n=4, **SIZE)
    assert [choice.index for choice in warm.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in warm.choices}) >= 2
    cold = api.chat.completions.create(model="toy", messages=HELLO, n=4, temperature=0, **SIZE)
    assert len({choice.message.content for choice in cold.choices}) == 1
    assert cold.usage.prompt_tokens == warm.usage.prompt_tokens  # one prompt
    details = cold.usage.prompt_tokens_details
    assert details.cached_tokens < cold.usage.prompt_tokens


def test_a_stream_of_n_answers(api: OpenAI) -> None:
    options: Any = {"model": "toy", "messages": HELLO, "n": 3, "seed": 5, **SIZE}
    whole = api.chat.completions.create(**options)
    texts = ["", "", ""]
    roles = [0, 0, 0]
    ends = []
    for chunk in api.chat.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [1, 1, 1]
    assert sorted(ends) == [0, 1, 2]


def test_a_seed_makes_an_answer_repeatable(api: OpenAI) -> None:
    def ask(seed: int) -> str:
        found = api.completions.create(
            model="toy", prompt="Hello", seed=seed, max_tokens=24, temperature=1.0
        )
        return found.choices[0].text

    assert ask(3) == ask(3)
    assert len({ask(seed) for seed in range(4)}) > 1
    pair = api.completions.create(model="toy", prompt="Hello", seed=3, n=2, max_tokens=24)
    assert [choice.text for choice in pair.choices] == [ask(3), ask(4)]


def test_stop_strings_never_leak(api: OpenAI) -> None:
    """UC-024."""
    options: Any = {"model": "toy", "prompt": "Hello", "temperature": 0, "max_tokens": 60}
    whole = api.completions.create(**options, extra_body=WHOLE).choices[0].text
    for start in range(5, 25, 4):
        stop = whole[start : start + 2]
        expected = whole[: whole.find(stop)]
        found = api.completions.create(**options, stop=[stop, "never"], extra_body=WHOLE)
        assert found.choices[0].text == expected
        assert found.choices[0].finish_reason == "stop"
        parts = [
            chunk.choices[0].text
            for chunk in api.completions.create(**options, stop=stop, stream=True, extra_body=WHOLE)
        ]
        assert "".join(parts) == expected


def test_prompts_in_every_form(api: OpenAI, reference: LLM) -> None:
    ids = reference.prompt_ids("Hello")
    forms: list[Any] = ["Hello", ids, ["Hello", "the end"], [ids, reference.prompt_ids("the end")]]
    found = [
        api.completions.create(model="toy", prompt=form, temperature=0, **SIZE) for form in forms
    ]
    texts = [[choice.text for choice in item.choices] for item in found]
    assert texts[0] == texts[1] == texts[2][:1]
    assert texts[2] == texts[3]
    assert found[2].usage.prompt_tokens == len(ids) + len(reference.prompt_ids("the end"))
    assert api.completions.create(model="toy", prompt="Hello").usage.completion_tokens <= 16


def test_limits_of_length(api: OpenAI) -> None:
    """UC-025, UC-026, UC-027, UC-029."""
    for num in (0, 1, 5):
        found = api.completions.create(
            model="toy",
            prompt="Hello",
            max_tokens=num,
            extra_body={**WHOLE, "return_token_ids": True},
        )
        assert found.usage.completion_tokens == num
        assert len(found.choices[0].model_extra["token_ids"]) == num
        assert found.choices[0].finish_reason == "length"
        details = found.usage.completion_tokens_details
        assert details.accepted_prediction_tokens <= num
        assert details.reasoning_tokens == 0  # they are not told apart, so none are claimed
    least = api.completions.create(
        model="toy",
        prompt="Hello",
        max_tokens=30,
        logit_bias={"1": 100},
        extra_body={"min_tokens": 6},
    )
    assert least.usage.completion_tokens == 7
    assert least.choices[0].finish_reason == "stop"
    open_end = api.chat.completions.create(
        model="toy", messages=HELLO, extra_body={**WHOLE, "deadline_s": 60}
    )
    assert open_end.choices[0].finish_reason == "length"
    assert open_end.usage.total_tokens == 1024  # as far as the context goes


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_limit_is_what_is_delivered_and_what_is_counted(
    api: OpenAI, is_streamed: bool
) -> None:
    """UC-026: a limit may fall anywhere in a block."""
    options: Any = {"model": "toy", "prompt": "Hello", "temperature": 0, "stream": is_streamed}
    if is_streamed:
        options["stream_options"] = {"include_usage": True}
    for num in range(1, 21):
        found = api.completions.create(
            **options, max_tokens=num, extra_body={**WHOLE, "return_token_ids": True}
        )
        parts = list(found) if is_streamed else [found]
        choices = [choice for part in parts for choice in part.choices]
        delivered = [token for choice in choices for token in choice.model_extra["token_ids"]]
        assert parts[-1].usage.completion_tokens == len(delivered) == num
        assert choices[-1].finish_reason == "length"


def test_sampling_options_reach_the_engine(api: OpenAI, reference: LLM) -> None:
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "seed": 11,
    }
    more: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, **WHOLE}
    found = api.completions.create(
        model="toy", prompt="Hello", max_tokens=20, logit_bias={"9": -5}, **options, extra_body=more
    )
    (expected,) = reference.generate(
        ["Hello"], SamplingParams(max_tokens=20, logit_bias={9: -5.0}, **options, **more)
    )
    assert found.choices[0].text == expected.text
    top = api.completions.create(
        model="toy", prompt="Hello", max_tokens=20, extra_body={"top_k": 1}
    )
    cold = api.completions.create(model="toy", prompt="Hello", max_tokens=20, temperature=0)
    assert top.choices[0].text == cold.choices[0].text  # UC-034


def test_penalties_change_the_text_and_speculation_does_not(api: OpenAI) -> None:
    """UC-031."""

    def ask(width: int, **options: Any) -> str:
        found = api.completions.create(
            model="toy",
            prompt="the end",
            temperature=0,
            max_tokens=40,
            extra_body={**WHOLE, "speculation": {"max_draft": width}, **options},
        )
        return found.choices[0].text

    for options in ({"repetition_penalty": 1.3}, {"frequency_penalty": 0.6}):
        assert ask(0, **options) == ask(4, **options)
    assert ask(4, frequency_penalty=2.0) != ask(4)


def test_logprobs_of_chats(api: OpenAI) -> None:
    options: Any = {"model": "toy", "messages": HELLO, "temperature": 0, "extra_body": WHOLE}
    found = api.chat.completions.create(**options, logprobs=True, top_logprobs=3, max_tokens=8)
    content = found.choices[0].logprobs.content
    assert len(content) == 8
    for item in content:
        assert item.token == item.top_logprobs[0].token
        assert item.logprob == item.top_logprobs[0].logprob <= 0.0
        assert len(item.top_logprobs) == 3
    data = b"".join(bytes(item.bytes) for item in content)
    assert data.decode("utf-8", errors="replace") == found.choices[0].message.content
    streamed = api.chat.completions.create(
        **options, logprobs=True, top_logprobs=3, max_tokens=8, stream=True
    )
    joined = [item for c in streamed for item in c.choices[0].logprobs.content]
    assert joined == content
    only = api.chat.completions.create(**options, logprobs=True, max_tokens=2)
    assert only.choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_completions(api: OpenAI) -> None:
    options: Any = {"model": "toy", "prompt": "Hello", "temperature": 0, "max_tokens": 6}
    found = api.completions.create(**options, logprobs=2, extra_body=WHOLE).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 6
    assert all(len(top) <= 2 for top in found.top_logprobs)
    assert found.text_offset[0] == 0
    streamed = api.completions.create(**options, logprobs=2, stream=True, extra_body=WHOLE)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [token for part in parts for token in part.tokens] == found.tokens
    assert [at for part in parts for at in part.text_offset] == found.text_offset


def test_logprobs_are_those_after_filters(api: OpenAI) -> None:
    found = api.completions.create(
        model="toy", prompt="Hello", max_tokens=3, logprobs=3, extra_body={"top_k": 1}
    )
    assert [len(top) for top in found.choices[0].logprobs.top_logprobs] == [1, 1, 1]
    assert found.choices[0].logprobs.token_logprobs == [0.0, 0.0, 0.0]


def test_usage_in_every_chunk(api: OpenAI) -> None:
    chunks = list(
        api.completions.create(
            model="toy",
            prompt="Hello",
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body=WHOLE,
        )
    )
    numbers = [chunk.usage.completion_tokens for chunk in chunks]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 8


def test_errors_are_the_client_s_own(api: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="toy", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="gpt-x", messages=HELLO)


def test_leaving_a_stream_early(api: OpenAI) -> None:
    with api.completions.create(
        model="toy", prompt="Hello", max_tokens=900, stream=True, extra_body=WHOLE
    ) as stream:
        next(iter(stream))
    assert api.completions.create(model="toy", prompt="Hello", max_tokens=2).choices
