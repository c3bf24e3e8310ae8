"""What a prompt becomes: an answer while it grows, and a completion when it is done.

It knows rounds and their tokens, no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.algorithms.survival import AcceptanceStats
from dspark.core import (
    FinishReason,
    Origin,
    Request,
    RoundResult,
    SamplingParams,
    TokenLogprobs,
)
from dspark.text.detokenizer import Detokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text as it is, token ids, or chat messages for the target's own template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What one answer cost. Seconds are wall-clock of the whole batch it ran in."""

    acceptance: AcceptanceStats
    prefill_s: float
    """From submission to the first token."""
    decode_s: float
    """From the first token to the last."""

    @property
    def tau(self) -> float | None:
        """Tokens committed per round; `None` if the answer ended with its first token."""
        return self.acceptance.tau


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer. `text` is cut before a stop string, `token_ids` after it."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    finish_reason: FinishReason
    origins: Sequence[Origin]
    logprobs: Sequence[TokenLogprobs] | None
    stats: RequestStats
    rounds: Sequence[RoundResult]
    """How it came about, the prompt's own pass first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt in a long line of them; `key` is the caller's own name for it."""

    key: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one round added to a streamed answer; the last piece has a `finish_reason`."""

    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Answer:
    """An answer while it grows."""

    request: Request
    detokenizer: Detokenizer | None
    started_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)

    def add(self, result: RoundResult, now_s: float) -> str:
        self.rounds.append(result)
        if not result.token_ids:
            return ""
        if not self.first_s:
            self.first_s = now_s
        self.last_s = now_s
        text = "" if self.detokenizer is None else self.detokenizer.push(result.token_ids)
        if result.finish_reason is not None and self.detokenizer is not None:
            text += self.detokenizer.flush()
        self.texts.append(text)
        return text

    def completion(self) -> Completion:
        has_logprobs = self.request.params.num_logprobs is not None
        reason = self.rounds[-1].finish_reason if self.rounds else FinishReason.LENGTH
        assert reason is not None
        return Completion(
            prompt_ids=self.request.prompt_ids,
            token_ids=[token for item in self.rounds for token in item.token_ids],
            text="".join(self.texts),
            finish_reason=reason,
            origins=[origin for item in self.rounds for origin in item.origins],
            logprobs=[p for item in self.rounds for p in item.logprobs or ()]
            if has_logprobs
            else None,
            stats=RequestStats(
                acceptance=AcceptanceStats.of(self.rounds),
                prefill_s=self.first_s - self.started_s if self.first_s else 0.0,
                decode_s=self.last_s - self.first_s,
            ),
            rounds=self.rounds,
        )
