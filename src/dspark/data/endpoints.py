"""Answers from OpenAI-compatible servers: several endpoints, many requests at once, retries.

It knows HTTP and JSON; ids of an answer come from the server if it returns them, else from the
chat template (`text.answer_span`). It runs no model.
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from dspark.data.answers import Answer
from dspark.data.preparation import Failure, Take, Turn
from dspark.errors import CapacityError, InputError
from dspark.text.answer_span import AnswerSpan

MAX_FAILURES_IN_A_ROW = 10
_TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)


def check_base(url: str, *, name: str) -> None:
    """Raises `InputError`, which names the option, for what is no base of a server."""
    try:
        parts = urlsplit(url)
        is_base = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
        _ = parts.port  # a number in range, or `ValueError`
    except ValueError:
        is_base = False
    if not is_base or any(character.isspace() for character in url):
        raise InputError(
            f"{name} is {url!r}, but it must be a base such as http://localhost:8000/v1."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Servers that hold the target, and how they are asked."""

    urls: Sequence[str]
    """Bases that end in /v1, of servers with the same model."""
    model: str
    """Name of the target at the servers."""
    concurrency: int = 32
    """Requests in flight, all servers together."""
    retries: int = 6
    """Further tries of a request after a fault that may pass, each at the next server."""
    backoff_s: float = 0.5
    """Pause before the first retry; each further one is twice as long."""
    timeout_s: float = 600.0
    """Longest wait for an answer."""
    has_token_ids: bool = False
    """Ask for the generated ids (`return_token_ids`, as vLLM has it)."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        for url in self.urls:
            check_base(url, name="endpoint")
        if not self.urls:
            raise InputError("endpoint is empty; give at least one, such as http://host:8000/v1.")
        for name, least in (("concurrency", 1), ("retries", 0), ("backoff_s", 0), ("timeout_s", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be >= {least}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What each request asks besides its conversation and sampling."""

    max_new_tokens: int
    seed: int
    thinking: bool | None


class _PassingFaultError(Exception):
    """A fault after which another try may succeed."""


class _LastingFaultError(Exception):
    """A fault that the same request would meet again."""


class Endpoints:
    """An `Answerer` over HTTP."""

    def __init__(
        self, config: EndpointConfig, *, options: RequestOptions, span: AnswerSpan | None
    ) -> None:
        """`span` finds the ids of answers that come as text; `None` where the server sends ids."""
        assert span is not None or config.has_token_ids
        self._config = config
        self._options = options
        self._span = span
        self._turns = count()
        self._stopped = threading.Event()

    def __call__(self, take: Take) -> Iterator[tuple[Turn, Answer | Failure]]:
        """Answers as they come. Raises `CapacityError` when nothing but failures comes."""
        pool = ThreadPoolExecutor(self._config.concurrency)
        pending: dict[Future[Answer | Failure], Turn] = {}
        num_failed = 0
        try:
            while True:
                while len(pending) < self._config.concurrency and (turn := take()) is not None:
                    pending[pool.submit(self._answer, turn)] = turn
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    turn, outcome = pending.pop(future), future.result()
                    num_failed = num_failed + 1 if isinstance(outcome, Failure) else 0
                    yield turn, outcome
                    if isinstance(outcome, Failure) and num_failed >= MAX_FAILURES_IN_A_ROW:
                        raise CapacityError(
                            f"{num_failed} requests in a row failed, the last with: "
                            f"{outcome.reason}; check the endpoints and run the same command "
                            "again, finished answers are kept."
                        )
        finally:
            self._stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)

    def _answer(self, turn: Turn) -> Answer | Failure:
        first, reason = next(self._turns), ""
        for attempt in range(self._config.retries + 1):
            if attempt and self._stopped.wait(self._config.backoff_s * 2.0 ** (attempt - 1)):
                break
            url = self._config.urls[(first + attempt) % len(self._config.urls)]
            try:
                return self._read(turn, self._post(url, self._body(turn)))
            except _PassingFaultError as error:
                reason = f"{url}: {error}"
            except (_LastingFaultError, InputError) as error:
                return Failure(reason=str(error))
        return Failure(reason=f"{reason} ({self._config.retries + 1} tries)")

    def _body(self, turn: Turn) -> Mapping[str, Any]:
        sampling, options = turn.sampling, self._options
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": turn.chat(),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": options.max_new_tokens,
            "seed": options.seed + turn.number,
        }
        # not of OpenAI's own API: named only where they differ from doing nothing
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if sampling.min_p > 0.0:
            body["min_p"] = sampling.min_p
        if options.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": options.thinking}
        if self._config.has_token_ids:
            body["return_token_ids"] = True
        return body

    def _post(self, url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._config.api_key is not None:
            headers["Authorization"] = f"Bearer {self._config.api_key}"
        request = urllib.request.Request(
            url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=self._config.timeout_s) as response:
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(300).decode(errors="replace").strip()
            kind = _PassingFaultError if error.code in _TRANSIENT else _LastingFaultError
            raise kind(f"HTTP {error.code}: {said}") from error
        except (OSError, ValueError, HTTPException) as error:
            # refused, reset, timed out, or cut in the middle of its JSON
            raise _PassingFaultError(f"{type(error).__name__}: {error}") from error
        if not isinstance(found, dict):
            raise _PassingFaultError("the answer is no JSON object")
        return found

    def _read(self, turn: Turn, found: Mapping[str, Any]) -> Answer:
        try:
            choice = found["choices"][0]
            message = choice["message"]
            text, reason = message["content"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise _PassingFaultError(f"the answer lacks {error}") from error
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if not isinstance(text, str) or not text:
            raise _LastingFaultError("the answer has no text")
        if reason not in ("stop", "length"):
            raise _LastingFaultError(f"the answer ended with {reason!r}")
        prompt_ids, answer_ids = self._ids(turn, found, text, reasoning, reason == "length")
        return turn.answered(
            prompt_token_ids=prompt_ids,
            token_ids=answer_ids,
            finish_reason=reason,
            text=text,
            reasoning=reasoning,
        )

    def _ids(
        self,
        turn: Turn,
        found: Mapping[str, Any],
        text: str,
        reasoning: str | None,
        is_truncated: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        if self._config.has_token_ids:
            prompt_ids, ids = found.get("prompt_token_ids"), found["choices"][0].get("token_ids")
            if not prompt_ids or not ids:
                raise _LastingFaultError("the server returned no token ids")
            return prompt_ids, ids
        assert self._span is not None
        both = self._span.ids(turn.chat(), text, reasoning=reasoning, is_truncated=is_truncated)
        return both.prompt_ids, both.answer_ids
