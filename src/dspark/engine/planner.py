"""What the cycle asks of a planner: who drafts in a step, and how many drafted tokens are verified.

A planner sees numbers by request: confidences, counts, seconds. It knows no token, no tensor and
no clock, so that a simulation drives it as the cycle does. `FixedPlanner` serves the baseline
policies, `AdaptivePlanner` the prefix scheduler.
Letters: R requests that decode in a step, K positions of a block.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from dspark.algorithms.calibration import Logits
from dspark.algorithms.foresight import Blocks
from dspark.algorithms.policies import WHOLE_BLOCK, Baseline, ConfidenceThreshold, FixedWidth
from dspark.algorithms.ranking import Floats, rank
from dspark.core import SamplingParams, VerifyPlan

NUM_RECORDS = 512
"""Plans that a planner remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A step before its block is drawn; a sequence has one entry for each request that decodes."""

    slots: Sequence[int]
    """Places of the requests; each belongs to one request from `Planner.begin` on."""
    rounds: Sequence[int]
    """Rounds that each has had."""
    max_widths: Sequence[int]
    """Drafted tokens worth verifying, at most."""
    num_prompt_tokens: int
    """Tokens of prompts that run in the same step, as far as is known."""
    num_certain: int
    """Tokens that the step commits without any draft."""
    context: int
    """Positions that all of them hold together."""
    copies: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Survivals [K] of blocks that are there already and ask no drafter, by request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step showed, by request of its outlook."""

    verified: Sequence[int]
    """Drafted tokens that were verified and do not stand behind the end of the answer."""
    accepted: Sequence[int]
    num_prompt_tokens: int
    draft_seconds: float | None
    """`None`: nobody took the time."""
    verify_seconds: float | None
    """Everything else of the step."""
    catch_up_seconds: float = 0.0
    """What the drafter made up for that had been put off; in neither of them."""

    @property
    def seconds(self) -> float | None:
        """Of the whole step; `None`: nobody took the time."""
        if self.draft_seconds is None or self.verify_seconds is None:
            return None
        return self.draft_seconds + self.verify_seconds + self.catch_up_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """One plan and what came of it."""

    num_requests: int
    num_drafting: int
    num_prompt_tokens: int
    lengths: Sequence[int]
    """Drafted tokens verified of each request."""
    accepted: Sequence[int]
    why: str
    """plain, drafted, probe (drafted to learn), explored (some rounds in full), or a baseline."""
    plain_rate: float | None
    """Predicted tokens per second of a step without drafting."""
    predicted_tokens: float | None
    predicted_seconds: float | None
    """Of the plan that was carried out."""
    seconds: float | None
    """What it took."""
    curve: "Curve | None" = None

    @property
    def rates_B(self) -> Floats | None:
        """Theta by budget: predicted tokens per second of a step that drafts."""
        return None if self.curve is None else self.curve.rates_B

    @property
    def budget(self) -> int:
        """Drafted tokens verified, all requests together."""
        return sum(self.lengths)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a decision was made of; Theta is drawn of it when somebody asks."""

    blocks_RHK: Blocks
    """Survivals of recent blocks."""
    caps: Sequence[int]
    seconds_B: Floats
    """Of a step that drafts for those with a cap, by budget."""

    @cached_property
    def rates_B(self) -> Floats:
        """(R + the b largest mean survivals) / seconds: tokens per second by budget."""
        ranking = rank(self.blocks_RHK.mean(1), np.array(self.caps))
        tokens_B = ranking.tokens(len(self.caps))[: len(self.seconds_B)]
        rates_B: Floats = tokens_B / self.seconds_B[: len(tokens_B)]
        return rates_B


class Planner(Protocol):
    """Once a step: `caps`, then `plan` if anybody drafts, then `observe`."""

    @property
    def records(self) -> deque[PlanRecord]:
        """The last steps."""

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A new request takes this place."""

    def caps(self, outlook: Outlook) -> list[int]:
        """Drafted tokens that may be verified of each request; 0: nothing is drafted for it."""

    def plan(
        self, logits_RK: Logits | None, caps: Sequence[int], copied: Sequence[int] = ()
    ) -> VerifyPlan:
        """Lengths by request, from the block's confidence logits (`None`: it has none).

        `copied`: requests whose block is a copy, which cost no drafter and whose logits are honest.
        `caps` may be lower than what `caps` gave: not every request was offered as much.
        """

    def observe(self, outcome: Outcome) -> None:
        """How the step ended."""


class FixedPlanner:
    """A baseline policy: it looks at neither costs nor outcomes."""

    def __init__(self, policy: Baseline) -> None:
        self.policy = policy
        self.records: deque[PlanRecord] = deque(maxlen=NUM_RECORDS)
        self._lengths: Sequence[int] = ()
        self._num_drafting = 0

    @classmethod
    def of_width(cls, width: int | None) -> "FixedPlanner":
        """The same number of drafted tokens of every request, `None`: all of the block."""
        return cls(FixedWidth(width=WHOLE_BLOCK if width is None else width))

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        """Nothing is kept of a request."""

    def caps(self, outlook: Outlook) -> list[int]:
        """The policy's width for so many requests, within each request's own."""
        widest = self.policy.widest(len(outlook.slots))
        caps = [min(widest, width) for width in outlook.max_widths]
        self._lengths, self._num_drafting = [0] * len(caps), sum(cap > 0 for cap in caps)
        return caps

    def plan(
        self,
        logits_RK: Logits | None,
        caps: Sequence[int],
        copied: Sequence[int] = (),  # noqa: ARG002 (it looks at no drafter)
    ) -> VerifyPlan:
        """What the policy says of these confidences."""
        if not isinstance(self.policy, ConfidenceThreshold) or logits_RK is None:
            self._lengths = caps
        else:
            confidence_RK = np.float32(1.0) / (1.0 + np.exp(-np.clip(logits_RK, -80.0, 80.0)))
            lengths_R = self.policy.lengths(confidence_RK.astype(np.float32), np.array(caps))
            self._lengths = lengths_R.tolist()
        return VerifyPlan(lengths=self._lengths)

    def observe(self, outcome: Outcome) -> None:
        """The record of the step."""
        self.records.append(
            PlanRecord(
                num_requests=len(self._lengths),
                num_drafting=self._num_drafting,
                num_prompt_tokens=outcome.num_prompt_tokens,
                lengths=self._lengths,
                accepted=outcome.accepted,
                why="baseline",
                plain_rate=None,
                predicted_tokens=None,
                predicted_seconds=None,
                seconds=outcome.seconds,
            )
        )
