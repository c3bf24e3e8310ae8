"""The profile as it is now, for one number of requests: taken a little at a time beside other work,
so that a load and what is foretold of it see the same machine.

It holds requests of its own and takes steps of every width with them. What those took, from call to
return, against what the profile says of such steps corrects it: by the median of each width, and by
what all steps took beyond those on average, since a load waits through the machine's pauses too. It
knows no policy and sees no step of the load.
Letters: N sizes of a row.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.ranking import Floats, Ints
from dspark.algorithms.step_cost import StepCost, VerifyRow
from dspark.core import SamplingParams
from dspark.engine.draft_source import DraftSource
from dspark.engine.step_bench import StepBench
from dspark.models.target import Target

_POSITIONS = 2048
"""Of all requests when they begin: longer prompts of many would take too long to read."""
_SHORTEST_CONTEXT = 32
_LEAST_S = 1e-9
_FEWEST_ROUNDS, _ROUNDS = 8, 64
"""Rounds that the pages of many requests hold, and those of one; then new ones begin."""


class SideProfile:
    """Pieces of two steps, and the table that they make of a profile."""

    def __init__(
        self,
        target: Target,
        drafter: DraftSource,
        *,
        cost: StepCost,
        num_requests: int,
        num_prompt_tokens: int,
        max_step_tokens: int,
        params: SamplingParams,
        clock: Callable[[], float],
    ) -> None:
        """`cost`: the profile. `num_prompt_tokens`: of a prompt that is read beside a step, as the
        load's are. `params`: how all requests draw their tokens."""
        self._target, self._drafter, self._cost = target, drafter, cost
        self._num_requests = num_requests
        self._num_prompt_tokens = max(min(num_prompt_tokens, max_step_tokens - num_requests), 1)
        self._max_step_tokens = max_step_tokens
        self._params, self._clock = params, clock
        self._sampled = 0.0 if params.is_greedy else 1.0
        self._rng = np.random.default_rng(0)
        self._coming: list[int] = []
        # measured over priced
        self._verify: defaultdict[int, list[float]] = defaultdict(list)
        self._draft: list[float] = []
        self._prompt: list[float] = []
        self._bench = self._open()

    def take(self) -> None:
        """The next piece: two steps of one width, of which the second is timed, or a plain one and
        one that reads a prompt. All come once before one comes again."""
        if not self._coming:
            self._coming = self._rng.permutation(self._cost.block_size + 2).tolist()
        width = self._coming.pop()
        if not self._take(width):
            self._bench = self._open()
            self._take(width)

    def table(self) -> StepCost | None:
        """The profile as all pieces so far correct it, all requests being like these; `None` where
        there are none."""
        found = {width: statistics.median(ratios) for width, ratios in self._verify.items()}
        if not found:
            return None
        usual = statistics.median(found.values())
        pauses = statistics.fmean(
            ratio / found[width] for width, ratios in self._verify.items() for ratio in ratios
        )
        widths = range(self._cost.block_size + 1)
        return self._corrected(
            [pauses * found.get(width, usual) for width in widths],
            draft=statistics.fmean(self._draft) if self._draft else pauses * usual,
            prompt=pauses * (statistics.median(self._prompt) if self._prompt else usual),
        )

    def _open(self) -> StepBench:
        count = self._num_requests
        context = min(self._cost.context, max(_POSITIONS // count, _SHORTEST_CONTEXT))
        bench = StepBench(
            self._target,
            self._drafter,
            num_requests=count,
            context=max(context, 1),
            num_rounds=max(_ROUNDS // count, _FEWEST_ROUNDS),
            max_step_tokens=self._max_step_tokens,
            clock=self._clock,
            params=self._params,
        )
        bench.warm_up(range(self._cost.block_size + 1))
        return bench

    def _take(self, width: int) -> bool:
        """Whether the requests could take it; beyond a block's widths it is a prompt's turn."""
        bench, is_prompt = self._bench, width > self._cost.block_size
        own = 0 if is_prompt else width
        bench.step(own)
        found = bench.step(own)
        if found is None or sum(found.verified) < own * self._num_requests:
            return False
        drafting = found.draft_seconds or 0.0
        draft, verify = self._priced(own)
        self._verify[own].append((bench.seconds - drafting) / verify)
        if own:
            self._draft.append(drafting / draft)
        plain = bench.seconds
        if is_prompt and bench.chunk(self._num_prompt_tokens) is not None:
            self._prompt.append((bench.seconds - plain) / self._priced_prompt())
        return True

    def _priced(self, width: int) -> tuple[float, float]:
        """What the profile says of the last step: the drafter's part, and the rest."""
        count, context = np.array([self._num_requests]), np.array([self._bench.context])
        draft = self._cost.draft_seconds(count, context, sampled=self._sampled)
        verify = self._cost.verify_seconds(
            self._num_requests, count * (1 + width), context, sampled=self._sampled
        )
        return max(float(draft[0]), _LEAST_S), max(float(verify[0]), _LEAST_S)

    def _priced_prompt(self) -> float:
        """What the prompt adds to a step, by the profile."""
        count, prompt = self._num_requests, self._num_prompt_tokens
        plain, whole = (
            self._cost.verify_seconds(
                count, np.array([count + n]), np.array([self._bench.context]), num_prompt_tokens=n
            )
            for n in (0, prompt)
        )
        return max(float(whole[0] - plain[0]), _LEAST_S)

    def _corrected(self, factors: list[float], *, draft: float, prompt: float) -> StepCost:
        """`factors` of the widths of these requests; their mean holds for other numbers of them."""
        cost, own = self._cost, self._num_requests
        usual = math.exp(statistics.fmean(math.log(max(factor, _LEAST_S)) for factor in factors))
        counts = sorted({own, *(row.num_requests for row in cost.verify)})
        rows = [
            VerifyRow(
                num_requests=count,
                curve=self._row(count, factors if count == own else [usual], prompt=prompt),
            )
            for count in counts
        ]
        ladder = np.array(cost.draft.sizes)
        drafts = cost.draft_seconds(ladder, ladder * cost.context, sampled=self._sampled)
        return replace(
            cost,
            draft=_curve(ladder, draft * drafts),
            verify=tuple(rows),
            sampled=None,  # it is in the rows
        )

    def _row(self, count: int, factors: list[float], *, prompt: float) -> CostCurve:
        """By the steps of all widths; beyond them it goes on as prompts do."""
        cost = self._cost
        known = next((row for row in cost.verify if row.num_requests == count), cost.verify[0])
        sizes = count * np.arange(1, cost.block_size + 2)
        more = np.array([n for n in known.curve.sizes if n > sizes[-1]], dtype=np.int64)
        both = np.concatenate([sizes, more])
        priced = cost.verify_seconds(
            count, both, np.array([count * cost.context]), sampled=self._sampled
        )
        seconds = priced.copy()
        seconds[: len(sizes)] *= np.resize(factors, len(sizes))
        last = len(sizes) - 1
        seconds[last + 1 :] = seconds[last] + prompt * (priced[last + 1 :] - priced[last])
        return _curve(both, np.maximum(seconds, 0.0))


def _curve(sizes: Ints, seconds: Floats) -> CostCurve:
    return CostCurve(
        sizes=tuple(sizes.tolist()), seconds=tuple(seconds.tolist()), errors=(0.0,) * len(sizes)
    )
