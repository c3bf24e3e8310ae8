"""Step costs in service: the profile, corrected by what steps really take.

It is told seconds and keeps the latest; corrections start from the profile each time.
"""

from dataclasses import dataclass

import numpy as np

from dspark.algorithms.live_cost import CostRatios, Part, StepSample
from dspark.algorithms.ranking import Floats
from dspark.algorithms.step_cost import StepCost

_FIRST_MERGE = 16
_MERGE_EVERY = 256
"""Steps: the table is corrected anew after it."""
_MOVED = 0.1
"""Change of a log of the machine's speeds from which the next merge waits less."""
_CONTEXT_GRAIN = 128
"""Positions of a request: seconds are found for a context rounded to this, and remembered."""
_PROMPT_GRAIN = 16
"""The same for tokens of prompts."""
_SHARE_GRAIN = 8
"""Shares of sampled requests are told apart by one part of so many."""
_MOST_FOUND = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of the two parts of a step of some requests."""

    verify_B: Floats
    """By drafted tokens verified: 0, 1, .. all that can be drafted."""
    draft_N: Floats
    """By requests that draft: 0, 1, .. all."""

    @classmethod
    def of(
        cls,
        cost: StepCost,
        num_requests: int,
        num_prompt_tokens: int,
        context: int,
        *,
        sampled: float = 0.0,
    ) -> "StepSeconds":
        """From a table. `context`: positions that all requests hold together; `sampled`: the share
        of the requests that are."""
        first = num_requests + num_prompt_tokens
        drafting_N = np.arange(num_requests + 1)
        return cls(
            verify_B=cost.verify_seconds(
                num_requests,
                first + np.arange(num_requests * cost.block_size + 1),
                np.array([context]),
                sampled=sampled,
                num_prompt_tokens=num_prompt_tokens,
            ),
            draft_N=cost.draft_seconds(
                drafting_N, context * drafting_N // num_requests, sampled=sampled
            ),
        )

    def of_step(self, num_drafting: int, budget: float) -> float:
        """A whole step; a budget in between is rounded."""
        index = min(round(budget), len(self.verify_B) - 1)
        return float(self.verify_B[index] + self.draft_N[num_drafting])

    def of_token(self, budget: float, num_requests: int) -> float:
        """A token in the pass, on average of a budget: beyond a shelf each costs more, and what a
        step of that budget gains is its tokens less what all of them cost."""
        most = len(self.verify_B) - 1
        high = min(max(round(budget), num_requests, 1), most)
        return max(float(self.verify_B[high] - self.verify_B[0]) / high, 0.0)


class LiveCosts:
    """Seconds of steps."""

    def __init__(self, profile: StepCost) -> None:
        self.profile = profile
        self.num_merges = 0
        """Times that the table was corrected anew."""
        self._ratios = CostRatios(profile)
        self._tables: dict[tuple[int, ...], StepCost] = {}
        self._found: dict[tuple[int, int, int, int], StepSeconds] = {}
        self._steps_since = 0
        self._wait = _FIRST_MERGE
        self._speeds = self._ratios.speeds

    def seconds(
        self, num_requests: int, num_prompt_tokens: int, context: int, *, sampled: float = 0.0
    ) -> "StepSeconds":
        """What steps of these requests cost, this share of them sampled; all but their number is
        rounded."""
        grain = context // (_CONTEXT_GRAIN * num_requests)
        chunk = -(-num_prompt_tokens // _PROMPT_GRAIN) * _PROMPT_GRAIN
        share = round(sampled * _SHARE_GRAIN)
        key = (num_requests, chunk, grain, share)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            held = (2 * grain + 1) * _CONTEXT_GRAIN * num_requests // 2
            found = StepSeconds.of(
                self.table(num_requests), num_requests, chunk, held, sampled=share / _SHARE_GRAIN
            )
            self._found[key] = found
        return found

    def observe(
        self,
        *,
        num_requests: int,
        num_drafting: int,
        num_tokens: int,
        context: int,
        draft_seconds: float,
        verify_seconds: float,
        sampled: float = 0.0,
    ) -> None:
        """What a step took, this share of its requests sampled. Steps that read prompts are not
        for this: no plan depends on them."""
        if num_drafting:
            self._ratios.add(
                StepSample(
                    part=Part.DRAFT,
                    num_requests=num_drafting,
                    num_tokens=0,
                    context=context * num_drafting // num_requests,
                    seconds=draft_seconds,
                    sampled=sampled,
                )
            )
        self._ratios.add(
            StepSample(
                part=Part.VERIFY,
                num_requests=num_requests,
                num_tokens=num_tokens,
                context=context,
                seconds=verify_seconds,
                sampled=sampled,
            )
        )
        self._steps_since += 1
        if self._steps_since >= self._wait or (
            self._steps_since % _FIRST_MERGE == 0 and self._has_moved
        ):
            self.merge()

    @property
    def _has_moved(self) -> bool:
        pairs = zip(self._ratios.speeds, self._speeds, strict=True)
        return any(abs(now - then) > _MOVED for now, then in pairs)

    def table(self, num_requests: int) -> StepCost:
        """The part of the corrected table that tells of so many requests."""
        rows = self.profile.rows_around(num_requests)
        if rows not in self._tables:
            self._tables[rows] = self._ratios.table(rows)
        return self._tables[rows]

    def merge(self) -> None:
        """What was seen counts from now on; tables are made when they are asked for."""
        self._tables.clear()
        self._found.clear()
        self.num_merges += 1
        self._steps_since = 0
        self._wait = min(2 * self._wait, _MERGE_EVERY)
        self._speeds = self._ratios.speeds
