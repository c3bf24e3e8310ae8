"""What passes between the clients' side and the engine's thread. It knows no HTTP and no JSON.

An `Order` goes in: all answers that one HTTP request asks for. `Piece`s come out, and at most one
`Failure`, which ends the order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dspark.core import FinishReason, Request, TokenLogprobs
from dspark.serving.thoughts import Thought


@dataclass(slots=True)
class Counts:
    """What one answer took; an answer's first token, the prompt's own, is no round."""

    num_tokens: int = 0
    num_offered: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    num_cached: int = 0
    """Tokens of the prompt whose keys and values were there already."""

    def add(self, other: "Counts") -> None:
        """Of several answers together; what the cache knew is counted by prompt, not here."""
        self.num_tokens += other.num_tokens
        self.num_offered += other.num_offered
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        self.num_rounds += other.num_rounds


class Piece(NamedTuple):
    """What one step added to one answer of an order."""

    answer: int
    """Which of the order's answers."""
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: FinishReason | None
    counts: Counts
    """So far; it goes on growing."""


class Cause(Enum):
    """Why an order failed."""

    INPUT = "input"
    DEADLINE = "deadline"
    ENGINE = "engine"
    SHUTDOWN = "shutdown"
    SLOW_READER = "slow reader"


class Failure(NamedTuple):
    """The end of an order without its answers."""

    cause: Cause
    message: str


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """The answers that one HTTP request asks for, each a request of the engine."""

    id: str
    requests: Sequence[Request]
    arrived_s: float
    """When it came, by the clock of the engine's thread."""
    deadline_s: float | None = None
    """When it fails if it is not over, by the same clock; `None`: never."""
    thought: Thought = Thought.NOWHERE
    """Where its answers may hold one."""
