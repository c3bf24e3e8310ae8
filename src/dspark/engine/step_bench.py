"""One number of requests at work in a cycle of its own, whose steps verify what they are told to.

Steps are timed by a clock from outside. The first steps do not count, nor does the first one after
a change between drafting and not, which finds its weights out of the caches.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dspark.algorithms.calibration import Logits
from dspark.core import Request, SamplingParams, VerifyPlan
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.draft_source import DraftSource, block_size_of
from dspark.engine.planner import Outcome, Outlook, PlanRecord
from dspark.models.target import Target

_WARMUP = 3
_PLAIN = 2
"""Plain steps of a round that are timed, one after the other."""
_PAGE = 64


@dataclass(slots=True)
class Samples:
    """Seconds by width, drafting apart."""

    draft: dict[int, list[float]] = field(default_factory=dict)
    verify: dict[int, list[float]] = field(default_factory=dict)

    def drafts(self) -> list[float]:
        """Those of every width that drafts: the drafter's part does not depend on it."""
        return [second for width, found in self.draft.items() if width for second in found]


class _Forced:
    """A planner that verifies what the profiler says, and takes down the seconds."""

    def __init__(self) -> None:
        self.records: deque[PlanRecord] = deque(maxlen=1)
        self.width = 0
        self.context = 0
        self.outcome: Outcome | None = None

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        pass

    def caps(self, outlook: Outlook) -> list[int]:
        self.context = outlook.context
        return [min(self.width, width) for width in outlook.max_widths]

    def plan(
        self, _logits_RK: Logits | None, caps: Sequence[int], _copied: Sequence[int] = ()
    ) -> VerifyPlan:
        return VerifyPlan(lengths=tuple(caps))

    def observe(self, outcome: Outcome) -> None:
        self.outcome = outcome


class StepBench:
    """One number of requests at work."""

    def __init__(
        self,
        target: Target,
        drafter: DraftSource,
        *,
        num_requests: int,
        context: int,
        num_rounds: int,
        max_step_tokens: int,
        clock: Callable[[], float],
        params: SamplingParams,
    ) -> None:
        self._params = params
        self._block_size = block_size_of(drafter)
        self._num_requests = num_requests
        self._num_ids = target.spec.vocab_size
        self._max_positions = target.spec.max_positions
        steps = num_rounds * (self._block_size + _PLAIN + 2) + _WARMUP + 8
        room = target.spec.max_positions - context - self._block_size
        self._max_tokens = min(steps * (self._block_size + 1), room)
        length = context + self._max_tokens + self._block_size
        self.planner, self._clock = _Forced(), clock
        self.cycle = Cycle(
            target,
            drafter=drafter,
            config=CycleConfig(
                max_requests=num_requests + 1,
                num_positions=(num_requests + 1) * -(-length // _PAGE) * _PAGE
                + max_step_tokens
                + 2 * _PAGE,
                max_step_tokens=max(max_step_tokens, num_requests * (self._block_size + 1)),
                max_prompt_tokens=max_step_tokens,
                prefix_cache=False,
                reserves_all=True,
            ),
            planner=self.planner,
            clock=clock,
        )
        self.seconds = 0.0
        """Of the last step, from its call to its return."""
        self._num_submitted = 0
        self._rng = np.random.default_rng(0)
        self._is_over = False
        for _ in range(num_requests):
            self._submit(context, max_tokens=self._max_tokens)
        self.planner.width = 0
        while self.planner.outcome is None or self.planner.outcome.num_prompt_tokens:
            self.cycle.step()

    def _submit(self, length: int, *, max_tokens: int) -> None:
        self._num_submitted += 1
        rng = np.random.default_rng(self._num_submitted)
        params = replace(
            self._params, seed=self._num_submitted, ignore_eos=True, max_tokens=max_tokens
        )
        prompt = rng.integers(0, self._num_ids, length).tolist()
        self.cycle.submit(Request(id=str(self._num_submitted), prompt_ids=prompt, params=params))

    def step(self, width: int) -> Outcome | None:
        """One step; `None` if its requests could not take the width any more, from then on."""
        if self._is_over or not self.cycle.has_work:
            return None
        self.planner.width, self.planner.outcome = width, None
        begun = self._clock()
        self.cycle.step()
        self.seconds = self._clock() - begun
        found = self.planner.outcome
        self._is_over = found is None or len(found.accepted) != self._num_requests
        return None if self._is_over else found

    def warm_up(self, widths: Sequence[int]) -> None:
        """The first steps, which do not count."""
        for _ in range(_WARMUP):
            self.step(widths[-1])

    def turn(
        self, widths: Sequence[int], samples: Samples, *, seconds: float, most_rounds: int
    ) -> None:
        """Every width in turn, once at least, until the time is up."""
        until = self._clock() + seconds
        for index in range(most_rounds):
            if index and self._clock() >= until:
                return
            if not self.round(self._rng.permutation(widths).tolist(), samples):
                return

    def round(self, widths: Sequence[int], samples: Samples) -> bool:
        """Every width once, in this order; whether all could be taken."""
        for width, is_timed in turns(widths):
            found = self.step(width)
            if found is None:
                return False
            if is_timed:
                samples.draft.setdefault(width, []).append(found.draft_seconds or 0.0)
                samples.verify.setdefault(width, []).append(found.verify_seconds or 0.0)
        return True

    @property
    def context(self) -> int:
        """Positions that the requests of the last step held together."""
        return self.planner.context

    @property
    def longest_prompt(self) -> int:
        """Tokens of a prompt that fits beside an answer."""
        return self._max_positions - 2

    def chunk(self, num_tokens: int) -> float | None:
        """Seconds of a step that also reads so many tokens of a prompt."""
        self._submit(num_tokens, max_tokens=1)
        found = self.step(0)
        if found is None or found.num_prompt_tokens != num_tokens:
            return None
        return found.verify_seconds

    def pace(self, num_tokens: int) -> float:
        """Seconds for each token of a prompt; 0 where that cannot be told."""
        self.chunk(num_tokens)  # the first does not count
        plain, whole = self.step(0), self.chunk(num_tokens)
        if plain is None or plain.verify_seconds is None or whole is None:
            return 0.0
        return max(whole - plain.verify_seconds, 0.0) / num_tokens


def turns(widths: Sequence[int]) -> list[tuple[int, bool]]:
    """The steps of a round, and which of them are timed: one with each width, plain ones apart."""
    drafted = [width for width in widths if width > 0]
    found = [(width, True) for width in drafted]
    if drafted:
        found.insert(0, (drafted[0], False))
    if 0 in widths:
        found += [(0, False), *[(0, True)] * _PLAIN]
    return found
