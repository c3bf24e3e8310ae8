"""One streamed request and when its parts came. It knows no load.

Tokens are counted by the server's usage, never by its chunks: a server that drafts sends several
tokens in one chunk, and one that holds back half a character sends none.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dspark.benchmarks.http_api import Event
from dspark.errors import ServerFault

NO_USAGE = "no usage"
ABANDONED = "abandoned"
"""Name of a call that the bench itself broke off."""


class StreamApi(Protocol):
    """A server, or what stands for one."""

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """The events that answer `body`; raises `ServerFault`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a user saw; times are those of `time.perf_counter`."""

    start_s: float
    end_s: float
    num_tokens: int
    """Of the answer, as the server counts them."""
    num_prompt_tokens: int
    arrivals: Sequence[tuple[float, int]]
    """Time and characters of each chunk with text."""
    fault: str | None
    """Name of what went wrong; such a call has no other figures."""
    num_drafted: int | None = None
    num_accepted: int | None = None
    text: str = ""
    """Of the answer, thoughts among it."""

    @property
    def ttft_s(self) -> float:
        """From the request to the first text."""
        return self.arrivals[0][0] - self.start_s

    @property
    def decoding_s(self) -> float:
        """From the first text to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def itl_s(self) -> float | None:
        """Time between tokens: decoding time over all tokens but the first (UC-149)."""
        return self.decoding_s / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> Iterator[float]:
        """Time between chunks, which is what the eye sees."""
        for (before, _), (after, _) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield after - before

    def tokens_between(self, start_s: float, end_s: float) -> float:
        """Tokens that came in this time: the usage's, spread over chunks by their text."""
        total = sum(size for _, size in self.arrivals)
        inside = sum(size for at, size in self.arrivals if start_s <= at < end_s)
        return self.num_tokens * inside / total if total else 0.0


def call(
    api: StreamApi, body: Mapping[str, Any], *, is_over: Callable[[], bool] = lambda: False
) -> Call:
    """Sends one chat request and reads its stream, until `is_over` says that nobody needs it."""
    start_s = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    texts: list[str] = []
    usage: Mapping[str, Any] | None = None
    fault: str | None = None
    events = api.stream("/chat/completions", body)
    try:
        for event in events:
            usage = event.data.get("usage") or usage
            text = _text(event.data)
            if text:
                arrivals.append((event.at_s, len(text)))
                texts.append(text)
            if is_over():
                fault = ABANDONED
                break
        else:
            fault = _missing(usage, arrivals)
    except ServerFault as error:
        fault = error.name
    finally:
        if hasattr(events, "close"):
            events.close()  # a server hears of it at once
    usage = usage or {}
    drafts = usage.get("speculation") or {}
    return Call(
        start_s=start_s,
        end_s=time.perf_counter(),
        num_tokens=int(usage.get("completion_tokens") or 0),
        num_prompt_tokens=int(usage.get("prompt_tokens") or 0),
        arrivals=arrivals,
        fault=fault,
        num_drafted=drafts.get("drafted_tokens"),
        num_accepted=drafts.get("accepted_tokens"),
        text="".join(texts),
    )


def _missing(usage: Mapping[str, Any] | None, arrivals: Sequence[object]) -> str | None:
    if not usage or "completion_tokens" not in usage:
        return NO_USAGE
    return None if arrivals else "empty answer"


def _text(data: Mapping[str, Any]) -> str:
    deltas = [choice.get("delta") or {} for choice in data.get("choices") or ()]
    names = ("content", "reasoning_content", "reasoning")
    return "".join(delta.get(name) or "" for delta in deltas for name in names)
