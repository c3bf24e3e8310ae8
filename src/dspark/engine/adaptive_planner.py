"""The prefix scheduler at work: whether a step drafts, for whom, and how much of it is verified.

Before the block is drawn, recent survivals and step costs say whether drafting beats plain
decoding, and what the budget is. The block's own confidences then fill it (`delayed`), or decide
it where that is exact (`causal`; `free` if the text of no request depends on what is verified).
It keeps what it learns: survivals by request, calibration, costs. It knows no token and no clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.algorithms.calibration import Calibration, Logits, SamplingClass
from dspark.algorithms.few_requests import admit_few, causal_few, foresee_few, free_few
from dspark.algorithms.foresight import Foresight, foresee
from dspark.algorithms.online_calibration import next_explored
from dspark.algorithms.policies import Adaptive, Search
from dspark.algorithms.prefix_scheduler import (
    Choice,
    Limits,
    Prices,
    admit,
    causal,
    choose_budget,
    free,
)
from dspark.algorithms.ranking import Survivals
from dspark.algorithms.step_cost import StepCost
from dspark.core import Coupling, SamplingParams, VerifyPlan
from dspark.engine.live_calibration import LiveCalibration
from dspark.engine.live_costs import LiveCosts
from dspark.engine.planner import NUM_RECORDS, Outcome, Outlook, PlanRecord
from dspark.engine.probes import Probes
from dspark.engine.survival_history import SurvivalHistory

_CAUSAL_UP_TO = 4
"""Requests: the confidences of a few say more about their own step than the budget of the last."""
_FEW = 4
"""Requests up to which plain arithmetic beats calls for arrays."""
_HOLDS, _HOLDS_FOR_MANY = 4, 2
"""Steps that one decision serves while nothing but blocks changes: it looks at older ones only."""
_TAKEN_IN_AT = 8
"""Outcomes that are taken in together, at most: the code is fetched once for all of them."""
_PROBED = 8
"""Requests that a probe drafts for, at most, in turn."""
_REFRESH_EVERY = 16
"""Steps after which requests that were left out draft again."""


@dataclass(slots=True)
class _Slot:
    """What is kept of a request besides its survivals."""

    sampling_class: int
    has_fixed_text: bool
    """Whether its text does not depend on what is verified."""
    floor: float
    seed: int
    explored: int
    """The next round that is verified in full."""


@dataclass(slots=True, kw_only=True)
class _Decision:
    """What is settled before a block is drawn; it may serve several steps."""

    caps: list[int]
    drafting: Sequence[int]
    """Rows of the requests that draft."""
    prices: Prices | None
    choice: Choice | None
    why: str
    search: Search = Search.CAUSAL
    floors_R: np.ndarray | None = None
    seconds_B: Sequence[float] = ()
    """Those of the prices, of few requests without floors; otherwise empty."""


@dataclass(slots=True)
class _Step:
    """A step between its outlook and its outcome."""

    outlook: Outlook
    decision: _Decision
    lengths: Sequence[int]
    planned: Sequence[int]
    """Lengths without what was explored."""
    logits_RK: Logits | None = None
    expected: float = 0.0


class AdaptivePlanner:
    """A `Planner` that maximises expected tokens per second."""

    def __init__(
        self,
        policy: Adaptive,
        *,
        block_size: int,
        cost: StepCost,
        calibration: Calibration | None = None,
    ) -> None:
        """`calibration` `None` believes the drafter's own confidences."""
        self.policy = policy
        self._records: deque[PlanRecord] = deque(maxlen=NUM_RECORDS)
        self._pending: list[tuple[_Step, Outcome]] = []
        self.costs = LiveCosts(cost)
        base = Calibration.identity(block_size) if calibration is None else calibration
        self.calibration = LiveCalibration(base, share=policy.share)
        self._blind: LiveCalibration | None = None  # for blocks without confidences
        self._block_size = block_size
        self._history = SurvivalHistory(block_size)
        self._probes = Probes()
        self._slots: dict[int, _Slot] = {}
        self._is_drafting = True
        self._budget: int | None = None
        self._steps_left_out = 0
        self._quarters = 4
        self._looks_wider = False
        self._next_probed = 0
        self._step: _Step | None = None
        self._rested: _Decision | None = None  # the decision that drafting does not pay
        self._held: _Decision | None = None
        self._held_for: tuple[object, ...] = ()
        self._steps_held = 0

    @property
    def records(self) -> deque[PlanRecord]:
        """The last steps."""
        self._take_in()
        return self._records

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A new request takes this place."""
        self._take_in()
        is_shared = params.effective_coupling is Coupling.SHARED_NOISE
        self._slots[slot] = _Slot(
            sampling_class=LiveCalibration.index(SamplingClass.of(params)),
            has_fixed_text=params.is_greedy or is_shared,
            floor=params.min_tokens_per_s,
            seed=seed,
            explored=next_explored(seed, 0, self.policy.share),
        )
        self._history.begin(slot)
        self._rested = self._held = None
        self._probes.begin()

    def caps(self, outlook: Outlook) -> list[int]:
        """Whole blocks for the requests that draft in this step, 0 for the others."""
        decision = self._decision(outlook)
        none = [0] * len(decision.caps)
        self._step = _Step(outlook, decision, lengths=none, planned=none)
        return decision.caps

    def plan(self, logits_RK: Logits | None, caps: Sequence[int]) -> VerifyPlan:
        """Lengths by the block's own survivals, within what was chosen before it."""
        step = self._step
        assert step is not None
        if logits_RK is None:
            logits_RK = np.zeros((len(caps), self._block_size), dtype=np.float32)
            if self._blind is None:
                self._blind = LiveCalibration.without_head(
                    self._block_size, share=self.policy.share
                )
        step.logits_RK = logits_RK
        if step.decision.seconds_B:
            self._plan_few(step, logits_RK, caps)
        else:
            self._plan_many(step, logits_RK, caps)
        return VerifyPlan(lengths=step.lengths)

    def observe(self, outcome: Outcome) -> None:
        """What was accepted and how long it took."""
        step, self._step = self._step, None
        assert step is not None
        self._pending.append((step, outcome))
        if len(self._pending) >= _TAKEN_IN_AT:
            self._take_in()

    def _plan_few(self, step: _Step, logits_RK: Logits, caps: Sequence[int]) -> None:
        decision, slots = step.decision, step.outlook.slots
        classes = [self._slots[slot].sampling_class for slot in slots]
        rows = self._calibration_in_use().survival_few(logits_RK.tolist(), classes)
        self._history.add_few([(slots[r], rows[r]) for r in decision.drafting])
        seconds_B, num_certain = decision.seconds_B, step.outlook.num_certain
        if decision.why == "probe":
            found = foresee_few([rows], seconds_B, decision.caps, num_certain)
            self._probes.found(pays=found.rate > self._plain_rate(decision))
        match decision.search:
            case Search.FREE:
                step.planned = free_few(rows, seconds_B, caps, num_certain)
            case Search.CAUSAL:
                step.planned = causal_few(rows, seconds_B, caps, num_certain)
            case Search.DELAYED:
                assert decision.choice is not None
                step.planned = admit_few(rows, decision.choice.budget, caps)
        step.lengths = self._explored(step, caps)
        step.expected = sum(
            sum(row[:length]) for row, length in zip(rows, step.lengths, strict=True)
        )

    def _plan_many(self, step: _Step, logits_RK: Logits, caps: Sequence[int]) -> None:
        decision, slots = step.decision, step.outlook.slots
        class_R = np.array([self._slots[slot].sampling_class for slot in slots])
        survival_RK = self._calibration_in_use().survival(logits_RK, class_R)
        rows = list(decision.drafting)
        self._history.add([slots[r] for r in rows], survival_RK[rows])
        if decision.why == "probe":
            assert decision.prices is not None
            found = foresee(survival_RK[None], decision.prices, np.array(decision.caps))
            self._probes.found(pays=found.rate > self._plain_rate(decision))
        step.planned = self._search(decision, survival_RK, caps)
        step.lengths = self._explored(step, caps)
        is_verified_RK = np.arange(self._block_size) < np.array(step.lengths)[:, None]
        step.expected = float(survival_RK[is_verified_RK].sum())

    def _search(
        self, decision: _Decision, survival_RK: Survivals, caps: Sequence[int]
    ) -> Sequence[int]:
        assert decision.prices is not None
        assert decision.choice is not None
        caps_R = np.array(caps)
        limits = Limits(caps_R=caps_R, floors_R=decision.floors_R)
        drafted = decision.prices.without_plain
        match decision.search:
            case Search.FREE:
                lengths_R = free(survival_RK, drafted, limits)[1]
            case Search.CAUSAL:
                lengths_R = causal(survival_RK, drafted, limits, decision.choice.least_R)[1]
            case Search.DELAYED:
                lengths_R = admit(survival_RK, decision.choice, caps_R)
        lengths: list[int] = lengths_R.tolist()
        return lengths

    def _calibration_in_use(self) -> LiveCalibration:
        return self.calibration if self._blind is None else self._blind

    def _plain_rate(self, decision: _Decision) -> float:
        assert decision.choice is not None
        return decision.choice.plain_rate or 0.0

    def _decision(self, outlook: Outlook) -> _Decision:
        able = [r for r, width in enumerate(outlook.max_widths) if width > 0]
        if not able:
            return self._plain(outlook)
        rested = self._rested
        if rested is not None and len(rested.caps) == len(outlook.slots):
            # nothing was drafted since drafting was found not to pay, so nothing is known anew
            if self._probes.is_due(len(outlook.slots), _loss_of(rested.choice)):
                return self._probe(outlook, able)
            return rested
        block_size = self._block_size
        now = (
            *outlook.slots,
            *[width if width < block_size else block_size for width in outlook.max_widths],
            outlook.num_prompt_tokens,
            outlook.num_certain,
        )
        holds = _HOLDS if len(outlook.slots) <= _FEW else _HOLDS_FOR_MANY
        if self._held is not None and self._steps_held < holds and self._held_for == now:
            self._steps_held += 1
            self._steps_left_out += self._steps_left_out > 0
            return self._held
        self._take_in()
        decision = self._decide(outlook, able)
        self._held = decision if decision.why == "drafted" else None
        self._held_for, self._steps_held = now, 1
        return decision

    def _plain(
        self, outlook: Outlook, prices: Prices | None = None, choice: Choice | None = None
    ) -> _Decision:
        none = [0] * len(outlook.slots)
        return _Decision(caps=none, drafting=(), prices=prices, choice=choice, why="plain")

    def _rest(
        self, outlook: Outlook, able: Sequence[int], prices: Prices, choice: Choice
    ) -> _Decision:
        """A step without drafts, unless it is time for a probe."""
        if self._probes.is_due(len(outlook.slots), _loss_of(choice)):
            return self._probe(outlook, able)
        self._rested = self._plain(outlook, prices, choice)
        return self._rested

    def _decide(self, outlook: Outlook, able: Sequence[int]) -> _Decision:
        """Whether the step drafts, for whom, and with which budget."""
        drafting, prices, foresight = self._best_group(outlook, able)
        plain_rate = outlook.num_certain / (prices.plain_seconds or 1.0)
        floors_R = self._floors(outlook)
        if floors_R is not None:
            return self._with_floors(outlook, drafting, prices, floors_R)
        rate = self._rate(outlook, foresight)
        margin = 0.0 if self._is_drafting else self.policy.margin
        self._is_drafting = rate > plain_rate * (1.0 + margin)
        choice = Choice(
            budget=self._kept_budget(foresight),
            least_R=None,
            rate=rate,
            plain_rate=plain_rate,
            rates_B=foresight.rates_B,
        )
        if self._is_drafting:
            self._probes.drafted()
            self._budget = choice.budget
            return self._drafted(outlook, drafting, prices, choice, why="drafted")
        self._budget = None
        return self._rest(outlook, able, prices, choice)

    def _best_group(
        self, outlook: Outlook, able: Sequence[int]
    ) -> tuple[Sequence[int], Prices, Foresight]:
        """The requests whose drafts pay best: all that can, or the most confident of them."""
        found = []
        for group in self._groups(outlook, able):
            prices, caps = self._prices(outlook, group)
            found.append((group, prices, self._foresee(outlook, prices, caps)))
        best = max(found, key=lambda item: self._rate(outlook, item[2]))
        self._quarters = max(1, -(-4 * len(best[0]) // len(able)))
        is_partial = len(best[0]) < len(able)
        self._steps_left_out = self._steps_left_out + 1 if is_partial else 0
        return best

    def _groups(self, outlook: Outlook, able: Sequence[int]) -> list[Sequence[int]]:
        """Groups to compare: the share that drafted before, and its neighbours in turn."""
        if len(able) < _CAUSAL_UP_TO or self._steps_left_out >= _REFRESH_EVERY:
            return [able]
        value_R = self._history.means([outlook.slots[r] for r in able]).sum(1)
        order = [able[i] for i in np.argsort(-value_R, kind="stable")]
        self._looks_wider = not self._looks_wider
        other = self._quarters + (1 if self._looks_wider else -1)
        parts = {self._quarters, min(max(other, 1), 4)}
        sizes = {max(len(able) * part // 4, 1) for part in parts}
        return [sorted(order[:size]) for size in sorted(sizes)]

    def _foresee(self, outlook: Outlook, prices: Prices, caps: Sequence[int]) -> Foresight:
        survival_SRK = self._history.scenarios(outlook.slots)
        if len(caps) > _FEW:
            return foresee(survival_SRK, prices, np.array(caps))
        return foresee_few(
            survival_SRK.tolist(), prices.seconds_B.tolist(), caps, prices.num_certain
        )

    def _caps_of(self, outlook: Outlook, drafting: Sequence[int]) -> list[int]:
        caps = [0] * len(outlook.slots)
        for r in drafting:
            caps[r] = min(outlook.max_widths[r], self._block_size)
        return caps

    def _prices(self, outlook: Outlook, drafting: Sequence[int]) -> tuple[Prices, list[int]]:
        caps = self._caps_of(outlook, drafting)
        prices = self.costs.prices(
            num_requests=len(caps),
            num_drafting=len(drafting),
            num_prompt_tokens=outlook.num_prompt_tokens,
            num_certain=outlook.num_certain,
            context=outlook.context,
            most=sum(caps),
        )
        return prices, caps

    def _rate(self, outlook: Outlook, foresight: Foresight) -> float:
        """What the search in force can reach."""
        is_delayed = self._find_search(outlook) is Search.DELAYED
        return foresight.fixed_rate if is_delayed else foresight.rate

    def _kept_budget(self, foresight: Foresight) -> int:
        """The best budget, or that of the step before if noise explains the gain."""
        if self._budget is None:
            return foresight.budget
        kept = min(self._budget, len(foresight.rates_B) - 1)
        gain = foresight.fixed_rate / float(foresight.rates_B[kept]) - 1.0
        return kept if gain <= self.policy.margin else foresight.budget

    def _with_floors(
        self, outlook: Outlook, drafting: Sequence[int], prices: Prices, floors_R: np.ndarray
    ) -> _Decision:
        """Requests may insist on a speed: the budget that keeps as many floors as can be."""
        caps_R = np.array(self._caps_of(outlook, drafting))
        choice = choose_budget(
            self._history.means(outlook.slots),
            prices,
            Limits(caps_R=caps_R, floors_R=floors_R),
            incumbent=self._budget,
            margin=self.policy.margin,
        )
        self._budget = choice.budget
        self._is_drafting = choice.budget > 0
        if self._is_drafting:
            self._probes.drafted()
            return self._drafted(outlook, drafting, prices, choice, why="drafted")
        return self._rest(outlook, drafting, prices, choice)

    def _probe(self, outlook: Outlook, able: Sequence[int]) -> _Decision:
        """A few requests draft to see how it stands."""
        count = min(_PROBED, len(able))
        picked = sorted({able[(self._next_probed + i) % len(able)] for i in range(count)})
        self._next_probed += count
        prices, caps = self._prices(outlook, picked)
        foresight = self._foresee(outlook, prices, caps)
        choice = Choice(
            budget=max(foresight.budget, len(picked)),
            least_R=None,
            rate=foresight.rate,
            plain_rate=outlook.num_certain / (prices.plain_seconds or 1.0),
            rates_B=foresight.rates_B,
        )
        return self._drafted(outlook, picked, prices, choice, why="probe")

    def _drafted(
        self,
        outlook: Outlook,
        drafting: Sequence[int],
        prices: Prices,
        choice: Choice,
        *,
        why: str,
    ) -> _Decision:
        self._rested = None
        floors_R = self._floors(outlook)
        is_few = len(outlook.slots) <= _FEW and floors_R is None
        return _Decision(
            caps=self._caps_of(outlook, drafting),
            drafting=drafting,
            prices=prices,
            choice=choice,
            why=why,
            search=self._find_search(outlook),
            floors_R=floors_R,
            seconds_B=prices.seconds_B.tolist() if is_few else (),
        )

    def _floors(self, outlook: Outlook) -> np.ndarray | None:
        floors = [self._slots[slot].floor for slot in outlook.slots]
        return np.array(floors) if any(floors) else None

    def _find_search(self, outlook: Outlook) -> Search:
        if self.policy.search is not None:
            return self.policy.search
        if all(self._slots[slot].has_fixed_text for slot in outlook.slots):
            return Search.FREE
        return Search.CAUSAL if len(outlook.slots) <= _CAUSAL_UP_TO else Search.DELAYED

    def _explored(self, step: _Step, caps: Sequence[int]) -> Sequence[int]:
        """Some rounds are verified in full; which, was drawn long before this block."""
        lengths, outlook = list(step.planned), step.outlook
        for r in step.decision.drafting:
            slot, now = self._slots[outlook.slots[r]], outlook.rounds[r]
            if slot.explored <= now:
                # rounds that passed without a draft are not made up for
                if slot.explored == now:
                    lengths[r] = caps[r]
                slot.explored = next_explored(slot.seed, now + 1, self.policy.share)
        return lengths

    def _take_in(self) -> None:
        """Learns from the steps that ended since the last time."""
        pending, self._pending = self._pending, []
        for step, outcome in pending:
            if step.logits_RK is not None:
                self._learn(step, outcome)
            predicted = self._predicted_seconds(step)
            is_timed = outcome.seconds is not None
            if is_timed and predicted is not None and outcome.num_prompt_tokens == 0:
                has_news = self.costs.observe(
                    num_requests=len(step.outlook.slots),
                    num_drafting=len(step.decision.drafting),
                    num_tokens=len(step.outlook.slots) + sum(step.lengths),
                    context=step.outlook.context,
                    draft_seconds=outcome.draft_seconds or 0.0,
                    verify_seconds=outcome.verify_seconds or 0.0,
                    predicted_seconds=predicted,
                )
                if has_news:
                    self._rested = None
            self._record(step, outcome, predicted)

    def _learn(self, step: _Step, outcome: Outcome) -> None:
        assert step.logits_RK is not None
        rows = list(step.decision.drafting)
        self._calibration_in_use().observe(
            step.logits_RK[rows],
            [self._slots[step.outlook.slots[r]].sampling_class for r in rows],
            planned=[step.planned[r] for r in rows],
            verified=[outcome.verified[r] for r in rows],
            accepted=[outcome.accepted[r] for r in rows],
        )

    def _predicted_seconds(self, step: _Step) -> float | None:
        prices = step.decision.prices
        if prices is None:
            return None
        if not step.decision.drafting:
            return prices.plain_seconds
        return float(prices.seconds_B[min(sum(step.lengths), len(prices.seconds_B) - 1)])

    def _record(self, step: _Step, outcome: Outcome, predicted: float | None) -> None:
        choice = step.decision.choice
        is_explored = step.planned != step.lengths
        self._records.append(
            PlanRecord(
                num_requests=len(step.outlook.slots),
                num_drafting=len(step.decision.drafting),
                num_prompt_tokens=outcome.num_prompt_tokens,
                lengths=step.lengths,
                accepted=outcome.accepted,
                why="explored" if is_explored else step.decision.why,
                rates_B=None if choice is None else choice.rates_B,
                plain_rate=None if choice is None else choice.plain_rate,
                predicted_tokens=step.outlook.num_certain + step.expected,
                predicted_seconds=predicted,
                seconds=outcome.seconds,
            )
        )


def _loss_of(choice: Choice | None) -> float:
    """Share of the plain speed that drafting is expected to lose."""
    if choice is None or not choice.plain_rate:
        return 0.0
    return max(1.0 - choice.rate / choice.plain_rate, 0.0)
