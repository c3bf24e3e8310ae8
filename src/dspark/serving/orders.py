"""From a request's body to an order: prompts as ids, options as `SamplingParams`.

What depends on the model is checked here. It knows no HTTP.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dspark.algorithms.late_grammar import LateGrammar
from dspark.core import Grammar, Request, SamplingParams
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.serving.protocol import ChatRequest, CompletionRequest, Message, ToolCall
from dspark.serving.refusals import Refusal
from dspark.serving.thoughts import END as END_OF_THOUGHT
from dspark.serving.thoughts import Thought
from dspark.serving.tools import grammar_of, instructions, rendered_call
from dspark.serving.work import Order

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request names no limit; the API's own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request without limits of its own gets."""

    chat_tokens: int | None = None
    """Tokens of a chat answer, as far as context and cache go; `None`: all of that."""
    deadline_s: float | None = None
    """Seconds until an answer is given up; a request may ask for less."""


class OrderDesk:
    """Makes orders for one LLM. Tokenizing is work: call it from one thread, not the event loop."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self._llm = llm
        self._limits = limits
        self._has_thoughts = llm.tokenizer.template_says(END_OF_THOUGHT)

    def chat(self, body: ChatRequest, *, order_id: str, now_s: float) -> Order:
        """The order of a conversation. Raises `Refusal` or `InputError`."""
        thinking = self._thinking(body)
        prompt = self._prompt(body, thinking)
        return self._order(
            body,
            [self._llm.tokenizer.encode_rendered(prompt)],
            default=self._limits.chat_tokens,
            order_id=order_id,
            now_s=now_s,
            grammar=self._grammar(body, thinking),
            thought=Thought.of(prompt, has_marks=self._has_thoughts),
        )

    def _thinking(self, body: ChatRequest) -> bool | None:
        """The mode that the request or else the server asks for; `None` leaves it to the template.

        No thoughts are what a template without modes gives anyway.
        """
        options = body.chat_template_kwargs
        asked = None if options is None else options.enable_thinking
        if asked is None:
            return self._llm.thinking
        if self._llm.tokenizer.has_thinking_modes:
            return asked
        if asked:
            field = "chat_template_kwargs.enable_thinking"
            raise Refusal(
                400,
                f"{field} is true, but this model's chat template has no thinking mode; leave it "
                "out.",
                param=field,
            )
        return None

    def _prompt(self, body: ChatRequest, thinking: bool | None) -> str:
        tokenizer = self._llm.tokenizer
        knows_tools = tokenizer.knows_tools
        messages = [_message(message, knows_tools=knows_tools) for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.usable_tools]
        if tools and not knows_tools:
            messages = _with_instructions(messages, instructions(tools))
        return tokenizer.render(
            messages, thinking=thinking, tools=tools if tools and knows_tools else None
        )

    def _grammar(self, body: ChatRequest, thinking: bool | None) -> Grammar | None:
        """What holds the answer to its form, behind its thoughts if it thinks."""
        form = body.response_format
        tools = [tool.model_dump(exclude_none=True) for tool in body.usable_tools]
        try:
            if tools:
                tag = grammar_of(
                    tools,
                    must_call=body.must_call,
                    may_call_again=body.parallel_tool_calls is not False,
                )
                grammar: Grammar = self._llm.grammars.structural_tag(tag)
            elif form is None or form.type == "text":
                return None
            elif form.json_schema is None:
                grammar = self._llm.grammars.json_schema({"type": "object"})
            else:
                grammar = self._llm.grammars.json_schema(form.json_schema.schema_)
        except InputError as error:
            param = "tools" if tools else "response_format"
            raise Refusal(400, str(error), param=param) from error
        is_free = bool(tools) and not body.must_call
        if is_free or thinking is False or not self._llm.tokenizer.has_thinking_modes:
            return grammar
        return LateGrammar(
            grammar=grammar,
            marker=self._llm.tokenizer.encode_rendered(END_OF_THOUGHT),
            end_ids=self._llm.target.spec.eos_ids,
        )

    def completion(self, body: CompletionRequest, *, order_id: str, now_s: float) -> Order:
        """The order of plain prompts. Raises `Refusal` or `InputError`."""
        prompts = [self._llm.prompt_ids(prompt) for prompt in body.prompts]
        for ids in prompts:
            if not ids:
                raise InputError("prompt is empty; give at least one token.")
            self._known_id("prompt", min(ids))
            self._known_id("prompt", max(ids))
        return self._order(body, prompts, default=COMPLETION_TOKENS, order_id=order_id, now_s=now_s)

    def _order(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        *,
        default: int | None,
        order_id: str,
        now_s: float,
        grammar: Grammar | None = None,
        thought: Thought = Thought.NOWHERE,
    ) -> Order:
        requests: list[Request] = []
        for prompt_ids in prompts:
            params = self._params(body, len(prompt_ids), default)
            params = replace(params, grammar=grammar) if grammar is not None else params
            for i in range(body.n or 1):
                requests.append(
                    Request(
                        id=f"{order_id}-{len(requests)}",
                        prompt_ids=prompt_ids,
                        params=params if i == 0 else _reseeded(params, i),
                    )
                )
        seconds = [s for s in (body.deadline_s, self._limits.deadline_s) if s is not None]
        return Order(
            id=order_id,
            requests=requests,
            arrived_s=now_s,
            deadline_s=now_s + min(seconds) if seconds else None,
            thought=thought,
        )

    def _params(
        self, body: ChatRequest | CompletionRequest, num_prompt: int, default: int | None
    ) -> SamplingParams:
        max_draft = None
        min_tokens_per_s = None
        if body.speculation is not None:
            max_draft = body.speculation.max_draft
            min_tokens_per_s = body.speculation.min_tokens_per_s
            if max_draft is not None and max_draft > self._llm.block_size:
                raise Refusal(
                    400,
                    f"speculation.max_draft is {max_draft}, but this server drafts at most "
                    f"{self._llm.block_size} tokens; give 0..{self._llm.block_size}.",
                    param="speculation.max_draft",
                )
        return SamplingParams(
            **_given(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k if (body.top_k or 0) > 0 else None,
                min_p=body.min_p,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                repetition_penalty=body.repetition_penalty,
                logit_bias=self._bias(body.logit_bias),
                seed=body.seed,
                min_tokens=body.min_tokens,
                ignore_eos=body.ignore_eos,
                stop_token_ids=self._stop_ids(body.stop_token_ids),
                num_logprobs=body.num_logprobs,
                max_draft=max_draft,
                min_tokens_per_s=min_tokens_per_s,
            ),
            stop=body.stops,
            max_tokens=self._most(body, num_prompt, default),
        )

    def _most(
        self, body: ChatRequest | CompletionRequest, num_prompt: int, default: int | None
    ) -> int:
        asked = body.most_tokens
        room = self._llm.target.spec.max_positions - num_prompt
        if room < 1 or (asked or 0) > room:
            wish = "" if asked is None else f" and the answer asks for {asked}"
            raise Refusal(
                400,
                f"This model's context holds {num_prompt + room} tokens, but the prompt has "
                f"{num_prompt}{wish}; shorten the prompt or lower max_tokens.",
                param="max_tokens" if room >= 1 else body.prompt_field,
                code="context_length_exceeded",
            )
        if asked is not None:
            return asked
        pages = self._llm.config.num_positions // self._llm.config.page_size
        held = pages * self._llm.config.page_size - num_prompt - self._llm.block_size
        most = room if default is None else default
        return max(
            min(room, held, most), 1
        )  # what the cache cannot hold at all, the engine refuses

    def _bias(self, bias: dict[str, float] | None) -> dict[int, float] | None:
        if bias is None:
            return None
        found = {}
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise InputError(f"logit_bias holds the key {key!r}, but a key is a token id.")
            found[self._known_id("logit_bias", int(key))] = value
        return found

    def _stop_ids(self, ids: Sequence[int] | None) -> list[int] | None:
        return None if ids is None else [self._known_id("stop_token_ids", i) for i in ids]

    def _known_id(self, field: str, token_id: int) -> int:
        size = self._llm.target.spec.vocab_size
        if not 0 <= token_id < size:
            raise InputError(
                f"{field} holds token id {token_id}, but this model knows 0..{size - 1}."
            )
        return token_id


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _with_instructions(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with words for its system message."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    return [first, *messages[1:]]


def _message(message: Message, *, knows_tools: bool) -> dict[str, Any]:
    """As chat templates read it; calls become text for one that does not know them."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if message.name is not None:
        found["name"] = message.name
    if message.reasoning_content is not None:
        found["reasoning_content"] = message.reasoning_content
    calls = message.tool_calls or ()
    if calls and knows_tools:
        found["tool_calls"] = [_for_template(call) for call in calls]
    elif calls:
        texts = [rendered_call(call.function.name, call.function.arguments) for call in calls]
        found["content"] = "\n".join(filter(None, [found["content"], *texts]))
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def _for_template(call: ToolCall) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    values = call.model_dump()
    with suppress(ValueError):
        values["function"]["arguments"] = json.loads(call.function.arguments)
    return values


def _reseeded(params: SamplingParams, i: int) -> SamplingParams:
    """Answer i of n: with a seed the next ones, so that answers differ and each can be repeated."""
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + i) % 2**63)
