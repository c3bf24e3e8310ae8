"""An engine made of numbers: recorded rounds, a table of step costs, and the real planner.

It takes requests and steps as `engine.cycle.Cycle` does, so that the same loads run on it; a step
takes as long as the table says. No model, no token: a request names a recorded answer by its
first prompt id; ids that are `ANSWERED` stand for the part of the answer that is there already.
Letters: R requests that decode, K positions of a block.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.algorithms.calibration import Logits
from dspark.algorithms.prompt_shares import prompt_budget, prompt_shares
from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.load.deck import Task
from dspark.benchmarks.simulation.recording import RecordedAnswer, Recording
from dspark.core import FinishReason, Origin, Request, RoundResult, StepResult
from dspark.engine.live_calibration import LiveCalibration
from dspark.engine.planner import Outcome, Outlook, Planner

ANSWERED = -1


@dataclass(slots=True)
class SimulatedClock:
    """Seconds that steps have taken."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Limits of the simulated engine, as of a real one."""

    max_requests: int
    max_step_tokens: int


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request in flight."""

    request: Request
    slot: int
    answer: RecordedAnswer
    age: int
    """Tokens of the answer that came with the prompt."""
    num_read: int = 0
    """Tokens of the prompt that have run."""
    num_answer: int = 0
    num_rounds: int = 0

    first_round: int
    """The recorded round that the answer begins with."""

    @property
    def round(self) -> int:
        """The recorded round that comes next."""
        return (self.first_round + self.num_rounds) % self.answer.num_rounds

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_left(self) -> int:
        return self.request.params.max_tokens - self.num_answer

    @property
    def context(self) -> int:
        """Positions computed: all but the anchor."""
        return self.num_prompt + self.num_answer - 1

    def max_width(self, block_size: int) -> int:
        cap = self.request.params.max_draft
        return max(0, min(block_size, block_size if cap is None else cap, self.num_left - 1))

    def commit(self, num_tokens: int) -> tuple[int, FinishReason | None]:
        """How many of these tokens the answer takes, and why it ends, if it does."""
        taken, reason = num_tokens, None
        if taken >= self.num_left:
            taken, reason = self.num_left, FinishReason.LENGTH
        if self.answer.is_stopped and not self.request.params.ignore_eos:
            rest = self.answer.num_tokens - self.age - self.num_answer
            if taken >= rest:
                taken, reason = max(rest, 1), FinishReason.STOP
        self.num_answer += taken
        return taken, reason


class SimulatedEngine:
    """`planner` decides, `cost` says how long a step takes, `clock` moves on by that."""

    def __init__(
        self,
        recording: Recording,
        *,
        cost: StepCost,
        planner: Planner,
        sizes: Sizes,
        clock: SimulatedClock,
    ) -> None:
        self._recording = recording
        self._cost = cost
        self._planner = planner
        self._sizes = sizes
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._live: list[_Live] = []
        self._free = list(range(sizes.max_requests))[::-1]

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._live or self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request for the recorded answer `prompt_ids[0]`."""
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request now; whether it was known."""
        for live in self._live:
            if live.request.id == request_id:
                self._close(live)
                return True
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def step(self) -> StepResult:
        """One round of every request that can take part."""
        self._admit()
        decoding = [live for live in self._live if live.num_answer > 0]
        caps = self._planner.caps(self._outlook(decoding)) if decoding else []
        chunks = self._chunks(decoding, caps)
        copied = self._copied(decoding, caps)
        lengths = self._lengths(decoding, caps, copied)
        num_tokens = len(decoding) + sum(lengths)
        num_prompt_tokens = sum(size for _, size in chunks)
        draft_s, verify_s = self._seconds(
            decoding, sum(cap > 0 for cap in caps) - len(copied), num_tokens, num_prompt_tokens
        )
        self._clock.now += draft_s + verify_s
        rounds = [
            self._round(live, cap, length)
            for live, cap, length in zip(decoding, caps, lengths, strict=True)
        ]
        if decoding:
            self._planner.observe(
                Outcome(
                    verified=[item.num_verified for item in rounds],
                    accepted=[item.num_accepted for item in rounds],
                    num_prompt_tokens=num_prompt_tokens,
                    draft_seconds=draft_s,
                    verify_seconds=verify_s,
                )
            )
        rounds += [first for live, size in chunks if (first := self._read(live, size)) is not None]
        return StepResult(
            rounds=rounds, num_prompt_tokens=num_prompt_tokens, num_verify_tokens=num_tokens
        )

    def _admit(self) -> None:
        while self._waiting and self._free:
            request = self._waiting.popleft()
            answer = self._recording.answers[request.prompt_ids[0]]
            age = request.prompt_ids.count(ANSWERED)
            live = _Live(
                request=request,
                slot=self._free.pop(),
                answer=answer,
                age=age,
                first_round=answer.round_at(age + 1),
            )
            self._planner.begin(live.slot, request.params, request.params.seed or 0)
            self._live.append(live)

    def _outlook(self, decoding: Sequence[_Live]) -> Outlook:
        reading = [live for live in self._live if live.num_answer == 0]
        missing = sum(live.num_prompt - live.num_read for live in reading)
        return Outlook(
            slots=[live.slot for live in decoding],
            rounds=[live.num_rounds for live in decoding],
            max_widths=[live.max_width(self._recording.block_size) for live in decoding],
            num_prompt_tokens=min(missing, self._budget(len(decoding))),
            num_certain=len(decoding),
            context=sum(live.context for live in decoding),
            copies=self._copies(decoding),
        )

    def _chunks(
        self, decoding: Sequence[_Live], caps: Sequence[int]
    ) -> Sequence[tuple[_Live, int]]:
        """Pieces of prompts in what verify windows leave of the pass."""
        reading = [live for live in self._live if live.num_answer == 0]
        missing = [live.num_prompt - live.num_read for live in reading]
        shares = prompt_shares(missing, self._budget(len(decoding) + sum(caps)))
        return [(live, share) for live, share in zip(reading, shares, strict=True) if share > 0]

    def _budget(self, num_windows: int) -> int:
        """Prompts are read as `bench load` has them read: in all that windows leave."""
        most = self._sizes.max_step_tokens
        return prompt_budget(num_windows, max_step_tokens=most, tokens_beside=most)

    def _copies(self, decoding: Sequence[_Live]) -> dict[int, list[float]]:
        found = {}
        for r, live in enumerate(decoding):
            answer = live.answer
            if answer.logits_JK is not None and answer.copied_J[live.round]:
                logits_1K = answer.logits_JK[live.round][None].tolist()
                (found[r],) = LiveCalibration.believed(logits_1K)
        return found

    def _copied(self, decoding: Sequence[_Live], caps: Sequence[int]) -> list[int]:
        """Those whose block is a copy."""
        pairs = zip(decoding, caps, strict=True)
        return [
            r for r, (live, cap) in enumerate(pairs) if cap > 0 and live.answer.copied_J[live.round]
        ]

    def _lengths(
        self, decoding: Sequence[_Live], caps: Sequence[int], copied: Sequence[int]
    ) -> Sequence[int]:
        if not any(caps):
            return [0] * len(decoding)
        return self._planner.plan(self._logits(decoding), caps, copied).lengths

    def _logits(self, decoding: Sequence[_Live]) -> Logits | None:
        rows = []
        for live in decoding:
            if live.answer.logits_JK is None:
                return None
            rows.append(live.answer.logits_JK[live.round])
        return np.stack(rows)

    def _seconds(
        self, decoding: Sequence[_Live], num_drafting: int, num_tokens: int, num_prompt_tokens: int
    ) -> tuple[float, float]:
        cost, count = self._cost, max(len(decoding), 1)
        context = sum(live.context for live in decoding)
        sampled = sum(not live.request.params.is_greedy for live in decoding) / count
        drafting_1 = np.array([num_drafting])
        draft_1 = cost.draft_seconds(drafting_1, context * drafting_1 // count, sampled=sampled)
        verify_1 = cost.verify_seconds(
            count,
            np.array([num_tokens + num_prompt_tokens]),
            np.array([context]),
            sampled=sampled,
            num_prompt_tokens=num_prompt_tokens,
        )
        return float(draft_1[0]), float(verify_1[0])

    def _round(self, live: _Live, cap: int, length: int) -> RoundResult:
        num_accepted = min(live.answer.accepted_J[live.round], length)
        taken, reason = live.commit(num_accepted + 1)
        live.num_rounds += 1
        if reason is not None:
            self._close(live)
        return RoundResult(
            request_id=live.request.id,
            token_ids=(0,) * taken,
            origins=(Origin.PLAIN,) * taken,
            logprobs=None,
            num_offered=self._recording.block_size if cap > 0 else 0,
            num_planned=length,
            num_accepted=min(num_accepted, taken),
            is_prefill=False,
            finish_reason=reason,
        )

    def _read(self, live: _Live, num_tokens: int) -> RoundResult | None:
        """A piece of a prompt; with its end comes the first token."""
        live.num_read += num_tokens
        if live.num_read < live.num_prompt:
            return None
        _, reason = live.commit(1)
        if reason is not None:
            self._close(live)
        return RoundResult(
            request_id=live.request.id,
            token_ids=(0,),
            origins=(Origin.PLAIN,),
            logprobs=None,
            num_offered=0,
            num_planned=0,
            num_accepted=0,
            is_prefill=True,
            finish_reason=reason,
        )

    def _close(self, live: _Live) -> None:
        self._live.remove(live)
        self._free.append(live.slot)


def tasks_of(recording: Recording) -> list[Task]:
    """What to ask a simulated engine for each recorded answer, with ids that it understands."""
    return [
        Task(
            domain=answer.domain,
            prompt_ids=[index] * answer.num_prompt_tokens,
            answer_ids=[ANSWERED] * answer.num_tokens,
        )
        for index, answer in enumerate(recording.answers)
    ]
