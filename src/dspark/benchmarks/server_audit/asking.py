"""Chat answers with log-probabilities from one side of an audit. It judges nothing."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.errors import ServerFault

Chat = Sequence[Mapping[str, str]]
OnAnswer = Callable[[int, int], None]
"""Hears how many answers came, and of how many."""
_PASSING = ("HTTP 429", "HTTP 503")
_NUM_TRIES = 6


class Api(Protocol):
    """A server, or what stands for one."""

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The JSON object that answers `body`; raises `ServerFault`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens as the server spells them, with what it says about their chances."""

    tokens: Sequence[str]
    logprobs: Sequence[float]
    tops: Sequence[Mapping[str, float]]
    """Most likely tokens of each position with their log-probabilities."""
    has_ended: bool
    """Whether the model ended it, not the limit of tokens."""
    num_drafted: int | None
    """Tokens that were drafted for it; `None` where the server does not tell."""


def sum_told(numbers: Iterable[int | None]) -> int | None:
    """Of those that the server told; `None` where it told none."""
    told = [number for number in numbers if number is not None]
    return sum(told) if told else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: a conversation and what it asks."""

    chat: Chat
    max_tokens: int
    temperature: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A server, or one way of asking it."""

    api: Api
    model: str
    top_logprobs: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Said in every request, such as that nothing shall be drafted."""

    def ask(self, question: Question) -> Answer:
        """One answer; a busy server is asked again. Raises `ServerFault`."""
        body = self._body(question)
        for attempt in range(_NUM_TRIES):
            try:
                return _read(self.api.post("/chat/completions", body))
            except ServerFault as fault:
                if fault.name not in _PASSING or attempt == _NUM_TRIES - 1:
                    raise
                time.sleep(0.5 * 2.0**attempt)
        raise AssertionError("the last try returned or raised")

    def _body(self, question: Question) -> Mapping[str, Any]:
        seed = {} if question.seed is None else {"seed": question.seed}
        return {
            "model": self.model,
            "messages": list(question.chat),
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "logprobs": True,
            "top_logprobs": self.top_logprobs,
            **question.fields,
            **seed,
            **self.extra,
        }


def ask_all(
    questions: Sequence[tuple[Side, Question]],
    *,
    concurrency: int,
    on_answer: OnAnswer = lambda *_: None,
) -> list[Answer]:
    """The answers in the order of the questions, so many of them in flight."""
    found = []
    with ThreadPoolExecutor(concurrency) as pool:
        for answer in pool.map(lambda pair: pair[0].ask(pair[1]), questions):
            found.append(answer)
            on_answer(len(found), len(questions))
    return found


def is_refused(side: Side, fields: Mapping[str, Any]) -> str | None:
    """Why the server refuses a request that says `fields`; `None` if it answers."""
    question = Question(chat=_PROBE, max_tokens=1, temperature=0.0, fields=fields)
    try:
        side.ask(question)
    except ServerFault as fault:
        if fault.name in ("HTTP 400", "HTTP 422"):
            return str(fault)
        raise
    return None


_PROBE: Chat = ({"role": "user", "content": "Hello"},)


def _read(found: Mapping[str, Any]) -> Answer:
    try:
        choice = found["choices"][0]
        entries = (choice.get("logprobs") or {}).get("content")
        finish = choice.get("finish_reason")
        if not entries:
            raise ServerFault(
                "no log-probabilities",
                "The server returns no log-probabilities for chat completions, so neither near "
                "ties nor stated chances can be read; start it with them, or audit another one.",
            )
        return Answer(
            tokens=[_token(entry) for entry in entries],
            logprobs=[float(entry["logprob"]) for entry in entries],
            tops=[_top(entry) for entry in entries],
            has_ended=finish != "length",
            num_drafted=_drafted(found.get("usage")),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ServerFault("not as OpenAI has it", f"The answer lacks {error}.") from error


def _token(entry: Mapping[str, Any]) -> str:
    """A token by its bytes where they are told: two halves of a character print alike."""
    raw = entry.get("bytes")
    return bytes(raw).decode("utf-8", "backslashreplace") if raw else str(entry["token"])


def _top(entry: Mapping[str, Any]) -> dict[str, float]:
    top: dict[str, float] = {}
    for other in entry.get("top_logprobs") or ():
        token = _token(other)
        top[token] = max(float(other["logprob"]), top.get(token, -float("inf")))
    return top


def _drafted(usage: Any) -> int | None:
    found = usage.get("speculation") if isinstance(usage, dict) else None
    number = found.get("drafted_tokens") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None
