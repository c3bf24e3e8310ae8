"""A planner in service without a model: requests whose drafts survive by chance, a fake clock.

True costs and true chances are known, so that a plan can be compared with the best one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.algorithms.step_cost import StepCost
from dspark.core import SamplingParams
from dspark.engine.planner import Outcome, Outlook, Planner
from tests.algorithms.toy_costs import draft_seconds_of, seconds_of

Chances = Callable[[np.random.Generator, int], np.ndarray]
"""(generator, step) -> chances of a block's positions, each given that those before survived."""


@dataclass
class Service:
    """`num_requests` requests at work; `step` moves all of them by one round."""

    planner: Planner
    truth: StepCost
    chances: Chances
    num_requests: int = 1
    block_size: int = 5
    params: SamplingParams = field(default_factory=lambda: SamplingParams(seed=1))
    noise: float = 0.0
    logits: Callable[[np.random.Generator, np.ndarray], np.ndarray] | None = None
    """What the drafter says of its chances; `None`: the truth."""
    slow: float = 1.0
    """All steps take so many times as long."""
    catch_up: float = 0.0
    """Seconds that a drafting step behind a plain one takes more."""
    seconds: float = 0.0
    tokens: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._has_drafted = False
        for slot in range(self.num_requests):
            self.planner.begin(slot, self.params, slot)

    def step(self) -> Sequence[int]:
        """Lengths that were verified."""
        count, size = self.num_requests, self.block_size
        context = count * self.truth.context
        caps = self.planner.caps(
            Outlook(
                slots=range(count),
                rounds=[self.num_steps] * count,
                max_widths=[size] * count,
                num_prompt_tokens=0,
                num_certain=count,
                context=context,
            )
        )
        drafting = [r for r, cap in enumerate(caps) if cap]
        chances_RK = np.stack([self.chances(self._rng, self.num_steps) for _ in range(count)])
        lengths: Sequence[int] = [0] * count
        if drafting:
            self.num_drafts += 1
            lengths = list(self.planner.plan(self._said(chances_RK), caps).lengths)
            assert all(length <= cap for length, cap in zip(lengths, caps, strict=True))
        is_kept_RK = self._rng.random((count, size)) < chances_RK
        accepted_R = np.minimum(is_kept_RK.cumprod(1).sum(1), lengths).astype(int)
        draft = draft_seconds_of(self.truth, len(drafting)) if drafting else 0.0
        verify = seconds_of(self.truth, count, count + sum(lengths))
        if not self.params.is_greedy:
            verify += float(self.truth.sampled_seconds(count, np.array([count + sum(lengths)]))[0])
        draft, verify = self._noisy(draft), self._noisy(verify)
        catch_up = self.catch_up if drafting and not self._has_drafted else 0.0
        self._has_drafted = bool(drafting)
        self.seconds += draft + verify + catch_up
        # what is expected, not what came: the outcome's luck is no merit of the plan
        expected_RK = chances_RK.cumprod(1) * (np.arange(size) < np.array(lengths)[:, None])
        self.tokens += count + float(expected_RK.sum())
        self.num_steps += 1
        self.planner.observe(
            Outcome(
                verified=lengths,
                accepted=accepted_R.tolist(),
                num_prompt_tokens=0,
                draft_seconds=draft,
                verify_seconds=verify,
                catch_up_seconds=catch_up,
            )
        )
        return lengths

    def rate(self, num_steps: int) -> float:
        """Tokens per second over the next steps."""
        tokens, seconds = self.tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _said(self, chances_RK: np.ndarray) -> np.ndarray:
        if self.logits is not None:
            return self.logits(self._rng, chances_RK).astype(np.float32)
        kept_RK = np.clip(chances_RK, 1e-4, 1 - 1e-4)
        return np.log(kept_RK / (1 - kept_RK)).astype(np.float32)

    def _noisy(self, seconds: float) -> float:
        return seconds * self.slow * float(np.exp(self.noise * self._rng.standard_normal()))


def plain_rate(truth: StepCost, num_requests: int) -> float:
    """Tokens per second without drafting."""
    return num_requests / seconds_of(truth, num_requests, num_requests)


def steady(chance: float) -> Chances:
    """Every position survives with the same chance."""
    return lambda rng, step: np.full(5, chance)


def phrases(low: float, high: float, share: float) -> Chances:
    """Blocks that are easy as a whole, with this share, or hard."""
    return lambda rng, step: np.full(5, high if rng.random() < share else low)
