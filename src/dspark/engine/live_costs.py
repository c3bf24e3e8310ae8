"""Step costs in service: the profile, corrected by what steps really take.

It is told seconds and keeps the latest; corrections start from the profile each time.
"""

import math

from dspark.algorithms.live_cost import CostRatios, Part, StepSample
from dspark.algorithms.prefix_scheduler import Prices
from dspark.algorithms.step_cost import StepCost

_FIRST_MERGE = 16
_MERGE_EVERY = 128
"""Steps: prices are made anew after it."""
_SURPRISE = 0.25
"""Mean log ratio of measured to predicted seconds from which the next merge waits less."""
_SURPRISE_EVERY = 64
_MEMORY = 0.9
_CONTEXT_GRAIN = 128
"""Positions: prices are looked up for a context rounded to this, and then remembered."""
_MOST_PRICES = 4096


class LiveCosts:
    """Prices of steps."""

    def __init__(self, profile: StepCost) -> None:
        self.profile = profile
        self._ratios = CostRatios(profile)
        self._tables: dict[tuple[int, ...], StepCost] = {}
        self._prices: dict[tuple[int, ...], Prices] = {}
        self._steps_since = 0
        self._wait = _FIRST_MERGE
        self._surprise = 0.0

    def prices(
        self,
        *,
        num_requests: int,
        num_drafting: int,
        num_prompt_tokens: int,
        num_certain: int,
        context: int,
        most: int,
    ) -> Prices:
        """What every budget up to `most` costs, plain decoding among the choices."""
        grain = context // (_CONTEXT_GRAIN * num_requests)
        key = (num_requests, num_drafting, num_prompt_tokens, num_certain, grain, most)
        found = self._prices.get(key)
        if found is None:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            found = self._table(num_requests).prices(
                num_requests=num_requests,
                num_drafting=num_drafting,
                num_prompt_tokens=num_prompt_tokens,
                num_certain=num_certain,
                context=(2 * grain + 1) * _CONTEXT_GRAIN * num_requests // 2,
                most=most,
                is_drafted=False,
            )
            self._prices[key] = found
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
        predicted_seconds: float,
    ) -> bool:
        """What a step took; whether it changed prices. Steps that read prompts are not for this:
        no plan depends on them."""
        if num_drafting:
            self._ratios.add(
                StepSample(
                    part=Part.DRAFT,
                    num_requests=num_drafting,
                    num_tokens=0,
                    context=context * num_drafting // num_requests,
                    seconds=draft_seconds,
                )
            )
        self._ratios.add(
            StepSample(
                part=Part.VERIFY,
                num_requests=num_requests,
                num_tokens=num_tokens,
                context=context,
                seconds=verify_seconds,
            )
        )
        seconds = draft_seconds + verify_seconds
        if seconds > 0.0 and predicted_seconds > 0.0:
            ratio = math.log(seconds / predicted_seconds)
            self._surprise = _MEMORY * self._surprise + (1.0 - _MEMORY) * ratio
        self._steps_since += 1
        is_surprised = abs(self._surprise) > _SURPRISE and self._steps_since >= _SURPRISE_EVERY
        is_due = self._steps_since >= self._wait or is_surprised
        if is_due:
            self._merge()
        return is_due

    def _table(self, num_requests: int) -> StepCost:
        """The part of the corrected table that tells of so many requests."""
        rows = self.profile.rows_around(num_requests)
        if rows not in self._tables:
            self._tables[rows] = self._ratios.table(rows)
        return self._tables[rows]

    def _merge(self) -> None:
        """What was seen counts from now on; tables are made when they are asked for."""
        self._tables.clear()
        self._prices.clear()
        self._steps_since = 0
        self._wait = min(2 * self._wait, _MERGE_EVERY)
        self._surprise = 0.0
