"""The OpenAI API as this server takes it: requests by field, and nothing that is not listed here.

A field that is unknown, or known and not supported, is an error that names it. It knows no model:
what depends on one is checked in `orders.py`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_ANSWERS = 128
"""Answers that one request may ask for."""
MOST_MESSAGES = 4096
"""Messages of one conversation; no longer list is looked at to its end."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """What an assistant asked a tool to do."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """One use of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """One message of a conversation. `developer` counts as `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing; an assistant's message alone may have none")
        return self


class StreamOptions(_Strict):
    """What a stream tells besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Speculation(_Strict):
    """How far a request may be drafted ahead; it changes speed, never the answer's distribution."""

    max_draft: Annotated[int, Field(ge=0)] | None = None
    min_tokens_per_s: Annotated[float, Field(ge=0.0)] | None = None


class TemplateOptions(_Strict):
    """Handed to the chat template."""

    enable_thinking: bool | None = None


class JsonSchema(_Strict):
    """A schema by name."""

    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """The answer follows the schema either way."""


class ResponseFormat(_Strict):
    """The form of the answer: free, any JSON object, or what a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing, but type is 'json_schema'")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"json_schema is given, but type is {self.type!r}")
        return self


class Function(_Strict):
    """What a tool does."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments follow the schema either way."""


class Tool(_Strict):
    """A function that the model may ask for."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    """The name of a tool."""

    name: str


class NamedTool(_Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class _Common(_Strict):
    """What both kinds of requests have."""

    _HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "best_of": (1,),
        "echo": (False,),
        "parallel_tool_calls": (True, False),
        "modalities": (["text"],),
        "functions": ([],),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "suffix": ("",),
        "use_beam_search": (False,),
    }
    """Fields of the API that ask for nothing with these values, or with null."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 and 0 keep all, as elsewhere."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None
    deadline_s: Annotated[float, Field(gt=0.0)] | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, data: Any) -> Any:
        """A field that asks for nothing is as good as absent."""
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields
            or not (value is None or any(_same(value, ok) for ok in cls._HARMLESS.get(name, ())))
        }

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(_Common):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if self.must_call and not names:
            raise ValueError("tool_choice is a call, but there are no tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise ValueError(f"tool_choice is {name!r}, but the tools are {', '.join(names)}")
        form = self.response_format
        if self.usable_tools and form is not None and form.type != "text":
            raise ValueError(f"response_format is {form.type}, but not beside tools; use one")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that this answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.tools or () if tool.function.name == name]
        return list(self.tools or ())

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is not true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_completion_tokens is {self.max_completion_tokens}, but max_tokens is "
                f"{self.max_tokens}; give one of them"
            )
        return self

    @property
    def prompt_field(self) -> str:
        """Where the prompt stands, for messages about it."""
        return "messages"

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer, at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams` takes it."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Common):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_ANSWERS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=MAX_ANSWERS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompt_field(self) -> str:
        """Where the prompt stands, for messages about it."""
        return "prompt"

    @property
    def most_tokens(self) -> int | None:
        """Tokens of an answer, at most."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As `SamplingParams` takes it."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


class CrowdSize(_Strict):
    """Body of POST /live/crowd."""

    users: Annotated[int, Field(ge=0, le=10_000)]


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody
