"""The prefix scheduler at work: whether a step drafts, for whom, and how much of it is verified.

Before a block is drawn, recent blocks and step costs say for whom drafting pays, and what a token
of the pass is worth (`algorithms.foresight`). The block's own confidences then say which of its
tokens are. It keeps what it learns: survivals by request, calibration, costs, the going rate. It
knows no token and no clock.

Most of its work is done once for several steps: what a decision looks at is older than the block
anyway, and between two steps all code has left the caches of the processor.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark.algorithms.calibration import Calibration, Logits
from dspark.algorithms.confidence import uninformed
from dspark.algorithms.few_requests import (
    Rows,
    admit_few,
    causal_few,
    foresee_alone,
    foresee_few,
    free_few,
    priced_few,
    stepped,
)
from dspark.algorithms.foresight import Blocks, Foresight, Worth, foresee
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
from dspark.algorithms.ranking import Floats, Survivals
from dspark.algorithms.step_cost import StepCost
from dspark.algorithms.terms import Terms
from dspark.core import SamplingParams, VerifyPlan
from dspark.engine.crew import Crew, Member
from dspark.engine.going_rate import GoingRate
from dspark.engine.hindsight import Hindsight
from dspark.engine.live_calibration import LiveCalibration, Rounds
from dspark.engine.live_costs import LiveCosts, StepSeconds
from dspark.engine.live_terms import LiveTerms
from dspark.engine.planner import NUM_RECORDS, Curve, Outcome, Outlook, PlanRecord
from dspark.engine.probes import LOOK, MOST_PROBED, PROBE, PlainLooks, Probes, candidates
from dspark.engine.survival_history import SurvivalHistory
from dspark.kernels.planning import best_prefixes, priced_prefixes

_FEW, _FEW_BLOCKS = 16, 8
"""Requests up to which plain arithmetic beats calls for arrays: of one block, of recent ones."""
_HOLDS = 16
"""Steps that a decision serves while the requests stay the same."""
_FIRST_STEPS, _HOLDS_FIRST = 64, 4
"""So many steps of a service learn faster."""
_FIRST_MARGIN = 0.08
"""Gain that drafting has to promise beyond the policy's margin in the first of them."""
_DEAREST_PROBE = 3.0
"""Times its prediction that a probe is charged at most: a pause of the machine is none."""
_PLAIN_LIFT = 1.001
"""Lift of the going rate below which it is that of plain decoding."""
_TAKEN_IN_AT = 32
"""Outcomes that are taken in together, at most."""


@dataclass(slots=True, kw_only=True)
class _Decision:
    """What is settled before a block is drawn."""

    crew: Crew
    has_prompts: bool
    drafting: Sequence[int]
    """Indices of the requests that draft."""
    probed: Sequence[int] = ()
    """Those of them for which it is not expected to pay."""
    seconds: StepSeconds
    worth: Worth
    terms: Terms
    """For the priced search."""
    plain_rate: float
    search: Search
    choice: Choice | None = None
    """Where the search needs a budget or floors."""
    trusts: Sequence[float] = ()
    """Factor on survivals by sampling class; empty: all are believed."""
    trust_R1: Survivals | None = None
    """The same by request, or one for all of them."""
    curve: Curve | None = None
    verify_B: Sequence[float] = ()
    """Seconds as plain numbers, for few requests."""
    is_look: bool = False
    """Whether it would draft, and does not to see what plain steps cost."""
    probe_loss: float | None = None
    """Tokens that the cheapest probe would have lost, where none could be afforded."""
    num_merges: int = 0
    """Of the costs that it rests on."""
    is_guess: bool = False
    """Whether prompts of the step were left out of its seconds."""
    steps_left: int = 0


@dataclass(slots=True)
class _Step:
    """A step between its outlook and its outcome."""

    outlook: Outlook
    decision: _Decision
    caps: Sequence[int]
    drafting: Sequence[int]
    lengths: Sequence[int]
    planned: Sequence[int] = ()
    """Lengths without what was explored."""
    copied: Sequence[int] = ()
    """Those who draft and whose block is a copy."""
    logits_RK: Logits | None = None
    survivals: Rows | Survivals | None = None
    """Of the block, as far as they are believed; until the step is taken in."""
    expected_R: Sequence[float] = ()
    """Drafted tokens expected to be accepted; from then on."""

    @property
    def drawn(self) -> Sequence[int]:
        """Those whose block the drafter drew."""
        if not self.copied:
            return self.drafting
        copied = set(self.copied)
        return [r for r in self.drafting if r not in copied]

    @property
    def num_drawn(self) -> int:
        """How many they are."""
        return len(self.drafting) - len(self.copied)

    def settle(self) -> None:
        """What is expected, of what was verified: nobody asks while the block waits for its
        lengths."""
        survivals, self.survivals = self.survivals, None
        if isinstance(survivals, np.ndarray):
            slot_K = np.arange(survivals.shape[1])
            is_verified_RK = slot_K < np.array(self.lengths)[:, None]
            self.expected_R = np.einsum("rk,rk->r", survivals, is_verified_RK).tolist()
        elif survivals is not None:
            rows = zip(survivals, self.lengths, strict=True)
            self.expected_R = [sum(row[:length]) for row, length in rows]


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
        """`calibration` `None` believes the drafter's own confidences. Where blocks come without
        any it gives way to a chance for each position, learnt from outcomes."""
        self.policy = policy
        self._records: deque[PlanRecord] = deque(maxlen=NUM_RECORDS)
        self._unrecorded: deque[tuple[_Step, Outcome]] = deque(maxlen=NUM_RECORDS)
        self.costs = LiveCosts(cost)
        base = Calibration.identity(block_size) if calibration is None else calibration
        self.calibration = LiveCalibration(base, share=policy.share)
        self._is_informed = True
        self._block_size = block_size
        self._history = SurvivalHistory(block_size)
        self._going = GoingRate()
        self._live_terms = LiveTerms()
        self._hindsight = [Hindsight() for _ in range(LiveCalibration.NUM_CLASSES)]
        self._probes = Probes()
        self._looks = PlainLooks()
        self._catch_up_each = 0.0
        """Seconds that the drafter made up for with each request of the last probes."""
        self._members: dict[int, Member] = {}
        self._did_draft: set[int] = set()
        self._drafted_last = False
        self._pending: list[tuple[_Step, Outcome]] = []
        self._budget: int | None = None
        self._num_steps = 0
        self._step: _Step | None = None
        self._held: _Decision | None = None
        self._has_come = False

    @property
    def records(self) -> deque[PlanRecord]:
        """The last steps; written when somebody asks."""
        while self._unrecorded:
            self._records.append(self._record(*self._unrecorded.popleft()))
        return self._records

    def begin(self, slot: int, params: SamplingParams, seed: int) -> None:
        """A new request takes this place."""
        self._members[slot] = Member.of(params, seed, self.policy.share)
        self._history.begin(slot)
        self._did_draft.discard(slot)
        self._has_come = True

    def caps(self, outlook: Outlook) -> list[int]:
        """Whole blocks for the requests that draft in this step, 0 for the others."""
        decision = self._decision(outlook)
        widths, size = outlook.max_widths, self._block_size
        none = [0] * len(widths)
        caps, drafting = none, decision.drafting
        if len(drafting) == len(widths):
            caps = list(widths) if max(widths) <= size else [min(width, size) for width in widths]
        elif drafting:
            caps = list(none)
            for r in drafting:
                caps[r] = min(widths[r], size)
        if drafting and not all(caps):
            drafting = [r for r in drafting if caps[r]]
        if outlook.copies and len(drafting) < len(widths) and not decision.is_look:
            caps = [*caps]
            for r in self._copying(outlook, decision, caps):
                caps[r] = min(widths[r], size)
            drafting = [r for r, cap in enumerate(caps) if cap]
        self._step = _Step(outlook, decision, caps=caps, drafting=drafting, lengths=none)
        return caps

    def _copying(self, outlook: Outlook, decision: _Decision, caps: Sequence[int]) -> list[int]:
        """Requests that do not draft and whose copy is worth its verification all the same."""
        idle = [r for r in outlook.copies if not caps[r] and outlook.max_widths[r]]
        if len(caps) > 1:
            price = decision.worth.price
            return [r for r in idle if outlook.copies[r][0] > price]
        verify_B, second = decision.seconds.verify_B, decision.worth.second
        found = []
        for r in idle:  # a lone request: its shelves are as wide as its block
            tokens_K = np.cumsum(outlook.copies[r])
            seconds_K = verify_B[1 : len(tokens_K) + 1] - verify_B[0]
            if float((tokens_K[: len(seconds_K)] - second * seconds_K).max()) > 0.0:
                found.append(r)
        return found

    def plan(
        self, logits_RK: Logits | None, caps: Sequence[int], copied: Sequence[int] = ()
    ) -> VerifyPlan:
        """Lengths by the block's own survivals, within what was chosen before it."""
        step = self._step
        assert step is not None
        if logits_RK is None:
            logits_RK = np.zeros((len(caps), self._block_size), dtype=np.float32)
            if self._is_informed:
                self._is_informed = False
                base = uninformed(self._block_size)
                self.calibration = LiveCalibration(base, share=self.policy.share)
        step.logits_RK, step.caps, step.copied = logits_RK, caps, copied
        if step.decision.verify_B:
            self._plan_few(step, logits_RK)
        else:
            self._plan_many(step, logits_RK)
        return VerifyPlan(lengths=step.lengths)

    def observe(self, outcome: Outcome) -> None:
        """What was accepted and how long it took."""
        step, self._step = self._step, None
        assert step is not None
        self._num_steps += 1
        ended = (step, outcome)
        self._unrecorded.append(ended)
        self._pending.append(ended)
        if len(self._pending) >= _TAKEN_IN_AT:
            self._take_in()

    def _plan_few(self, step: _Step, logits_RK: Logits) -> None:
        decision, caps = step.decision, step.caps
        crew, drafting = decision.crew, step.drafting
        logits = logits_RK.tolist()
        rows = self.calibration.survival_few(logits, crew.classes)
        copied = step.copied
        if copied:
            honest = self.calibration.believed([logits[r] for r in copied])
            for r, row in zip(copied, honest, strict=True):
                rows[r] = row
        if copied:
            drafting = step.drawn
        if len(drafting) == len(rows):
            self._history.add(crew.slots, rows)
        elif drafting:
            self._history.add([crew.slots[r] for r in drafting], [rows[r] for r in drafting])
        if decision.trusts:
            trust_R = [decision.trusts[index] for index in crew.classes]
            for r in copied:
                trust_R[r] = 1.0
            pairs = zip(rows, trust_R, strict=True)
            rows = [[trust * value for value in row] for row, trust in pairs]
        step.survivals = rows
        step.planned = self._search_few(decision, rows, caps)
        step.lengths = self._explored(step)

    def _search_few(self, decision: _Decision, rows: Rows, caps: Sequence[int]) -> list[int]:
        worth = decision.worth
        match decision.search:
            case Search.FREE:
                return free_few(rows, decision.verify_B, caps, worth=worth.second)
            case Search.PRICED if len(rows) == 1:
                return [stepped(rows[0], decision.verify_B, caps[0], worth=worth.second)]
            case Search.PRICED:
                price, most = decision.terms
                return priced_few(rows, caps, price=price, most=most)
            case Search.CAUSAL:
                draft = float(decision.seconds.draft_N[len(decision.drafting)])
                seconds_B = [verify + draft for verify in decision.verify_B]
                return causal_few(rows, seconds_B, caps, len(caps))
            case Search.DELAYED:
                assert decision.choice is not None
                return admit_few(rows, decision.choice.budget, caps)

    def _plan_many(self, step: _Step, logits_RK: Logits) -> None:
        decision, drafting = step.decision, step.drafting
        crew = decision.crew
        survival_RK = self.calibration.survival(logits_RK, crew.class_R)
        copied = list(step.copied)
        if copied:
            survival_RK[copied] = self.calibration.believed(logits_RK[copied].tolist())
            drafting = step.drawn
        if len(drafting) == len(survival_RK):
            self._history.add(crew.slots, survival_RK)
        elif drafting:
            self._history.add([crew.slots[r] for r in drafting], survival_RK[drafting])
        if decision.trust_R1 is not None:
            trust_R1 = np.broadcast_to(decision.trust_R1, (len(survival_RK), 1)).copy()
            trust_R1[copied] = 1.0
            survival_RK = survival_RK * trust_R1
        step.survivals = survival_RK
        step.planned = self._search_many(decision, survival_RK, step.caps)
        step.lengths = self._explored(step)

    def _search_many(
        self, decision: _Decision, survival_RK: Survivals, caps: Sequence[int]
    ) -> list[int]:
        floors_R, choice = decision.crew.floors_R, decision.choice
        if floors_R is None and decision.search is Search.FREE:
            seconds_B = decision.seconds.verify_B
            return best_prefixes(
                survival_RK, caps, seconds_B=seconds_B, worth=decision.worth.second
            )
        if floors_R is None and decision.search is Search.PRICED:
            price, most = decision.terms
            return priced_prefixes(survival_RK, caps, price=price, most=most)
        caps_R = np.array(caps, dtype=np.int64)
        if decision.search is Search.DELAYED:
            assert choice is not None
            lengths_R = admit(survival_RK, choice, caps_R)
        else:
            prices = self._prices(decision, len(caps))
            limits = Limits(caps_R=caps_R, floors_R=floors_R)
            if decision.search is Search.FREE:
                lengths_R = free(survival_RK, prices, limits)[1]
            else:
                least_R = None if choice is None else choice.least_R
                lengths_R = causal(survival_RK, prices, limits, least_R)[1]
        lengths: list[int] = lengths_R.tolist()
        return lengths

    def _explored(self, step: _Step) -> Sequence[int]:
        """Some rounds are verified in full; which, was drawn long before this block."""
        now = step.decision.crew.explores(step.outlook.rounds, self.policy.share)
        if not now:
            return step.planned
        lengths = list(step.planned)
        for r in now:
            lengths[r] = step.caps[r]
        return lengths

    def _prices(self, decision: _Decision, num_certain: int) -> Prices:
        """Of a block that is drafted."""
        seconds = decision.seconds
        return Prices(
            seconds_B=seconds.verify_B + seconds.draft_N[len(decision.drafting)],
            num_certain=num_certain,
            plain_seconds=None,
        )

    def _decision(self, outlook: Outlook) -> _Decision:
        held, slots = self._held, list(outlook.slots)
        members = self._members
        if held is not None and held.steps_left <= 0 and self._stands(held):
            held.steps_left = _HOLDS
        if held is not None and held.steps_left > 0:
            has_prompts = outlook.num_prompt_tokens > 0
            is_same = held.crew.slots == slots and not self._has_come
            if not is_same or held.has_prompts != has_prompts:
                held = self._patched(held, slots, outlook)
        elif held is not None and (held.probed or held.is_look or self._num_steps < _FIRST_STEPS):
            self._take_in()  # a probe, a look and the first steps are for what they show
            if held.is_look:
                self.costs.merge()
            held = None
        else:
            held = None
        if held is None:
            held = self._decide(outlook, Crew(slots, [members[slot] for slot in slots]))
        self._held, self._has_come = held, False
        held.steps_left -= 1
        return held

    def _stands(self, held: _Decision) -> bool:
        """Whether a decision to draft for nobody would be the same again: no block was drawn since,
        costs and the going rate, plain decoding's, are what they were, and a probe cannot be
        afforded."""
        return (
            held.probe_loss is not None
            and not held.drafting
            and self._num_steps >= _FIRST_STEPS
            and self._going.lift(len(held.crew.slots)) < _PLAIN_LIFT
            and held.num_merges == self.costs.num_merges
            and not self._probes.affords(held.probe_loss)
        )

    def _patched(self, held: _Decision, slots: list[int], outlook: Outlook) -> _Decision | None:
        """The decision in force for requests of which a few are others; `None`: decide anew.

        Those who came do as most do, until the next decision. Steps that draft for many requests
        are long enough for a decision of their own.
        """
        is_few = len(slots) <= _FEW
        if (held.drafting and not is_few) or held.search not in (Search.FREE, Search.PRICED):
            return None
        crew = Crew(slots, [self._members[slot] for slot in slots])
        known = {id(member): r for r, member in enumerate(held.crew.members)}
        before = [known.get(id(member)) for member in crew.members]
        if 2 * before.count(None) > len(before) or held.probed or crew.floors_R is not None:
            return None
        drafts = set(held.drafting)
        do_most = 2 * len(drafts) > len(held.crew.slots)
        has_prompts = outlook.num_prompt_tokens > 0
        seconds = self._seconds(crew, outlook, num_prompt_tokens=0)
        trusts, trust_R1 = self._trust(crew) if held.trusts else ((), None)
        return replace(
            held,
            crew=crew,
            has_prompts=has_prompts,
            drafting=[
                r for r, old in enumerate(before) if (do_most if old is None else old in drafts)
            ],
            seconds=seconds,
            # a price holds beside prompts as well, seconds without them do not
            search=Search.PRICED if has_prompts else self._find_search(crew),
            trusts=trusts,
            trust_R1=trust_R1,
            verify_B=seconds.verify_B.tolist() if is_few else (),
            is_guess=has_prompts,
        )

    def _decide(self, outlook: Outlook, crew: Crew) -> _Decision:
        """Whether the step drafts, for whom, and at which price."""
        count = len(crew.slots)
        caps = [min(width, self._block_size) for width in outlook.max_widths]
        seconds = self._seconds(crew, outlook, num_prompt_tokens=outlook.num_prompt_tokens)
        # prompts have to be read in any case: they are no part of what decoding earns
        usual = seconds
        if outlook.num_prompt_tokens:
            usual = self._seconds(crew, outlook, num_prompt_tokens=0)
        blocks_RHK = self._history.blocks(crew.slots)
        trusts, trust_R1 = self._trust(crew)
        if trust_R1 is not None:
            blocks_RHK *= trust_R1[:, :, None]
        foresight, worth = self._foresee(crew, blocks_RHK, caps, seconds, usual)
        drafting = foresight.drafting
        choice = None
        search = self._find_search(crew)
        if crew.floors_R is not None or search is Search.DELAYED:
            choice, drafting = self._budgeted(blocks_RHK, caps, seconds, drafting, crew.floors_R)
        probed, probe_loss = self._probed(outlook, caps, drafting, foresight, worth)
        self._did_draft.difference_update(crew.slots)
        self._did_draft.update(crew.slots[r] for r in drafting)
        is_look = self._is_look(outlook, crew, drafting)
        if is_look:
            drafting, probed = (), ()
        elif probed:
            drafting = sorted([*drafting, *probed])
        is_few = count <= _FEW and crew.floors_R is None
        return _Decision(
            crew=crew,
            has_prompts=outlook.num_prompt_tokens > 0,
            drafting=drafting,
            probed=probed,
            seconds=seconds,
            worth=worth,
            terms=self._terms(outlook, search, blocks_RHK, caps, drafting, seconds, worth),
            plain_rate=outlook.num_certain / float(seconds.verify_B[0]),
            search=search,
            choice=choice,
            trusts=trusts,
            trust_R1=trust_R1,
            curve=Curve(
                blocks_RHK=blocks_RHK,
                caps=caps,
                seconds_B=seconds.verify_B + seconds.draft_N[len(drafting)],
            ),
            verify_B=seconds.verify_B.tolist() if is_few else (),
            is_look=is_look,
            probe_loss=probe_loss,
            num_merges=self.costs.num_merges,
            steps_left=LOOK
            if is_look
            else self._steps_held(probed, is_alone=len(probed) == len(drafting)),
        )

    def _terms(
        self,
        outlook: Outlook,
        search: Search,
        blocks_RHK: Blocks,
        caps: Sequence[int],
        drafting: Sequence[int],
        seconds: StepSeconds,
        worth: Worth,
    ) -> Terms:
        """What the blocks of a step without prompts say; beside prompts the plain price, and for a
        lone request, of which each position has a price of its own."""
        most = len(caps) * self._block_size
        is_alone = len(caps) == 1
        if search is not Search.PRICED or not drafting or outlook.num_prompt_tokens or is_alone:
            return Terms(price=worth.price, most=most)
        own_RHK = blocks_RHK[drafting]
        for row_HK, cap in zip(own_RHK, [caps[r] for r in drafting], strict=True):
            row_HK[:, cap:] = 0.0
        return self._live_terms.decided(own_RHK, second=worth.second, verify_B=seconds.verify_B)

    def _seconds(self, crew: Crew, outlook: Outlook, *, num_prompt_tokens: int) -> StepSeconds:
        return self.costs.seconds(
            len(crew.slots), num_prompt_tokens, outlook.context, sampled=crew.sampled
        )

    def _steps_held(self, probed: Sequence[int], *, is_alone: bool = False) -> int:
        if probed:
            return PROBE if is_alone else 1
        if self._num_steps < _FIRST_STEPS:
            return _HOLDS_FIRST
        return _HOLDS

    def _is_look(self, outlook: Outlook, crew: Crew, drafting: Sequence[int]) -> bool:
        if not drafting or outlook.num_prompt_tokens or crew.floors_R is not None:
            return False
        count = len(crew.slots)
        held = self._steps_held(())
        return self._looks.is_due(count, lift=self._going.lift(count), num_steps=held)

    def _foresee(
        self,
        crew: Crew,
        blocks_RHK: Blocks,
        caps: Sequence[int],
        seconds: StepSeconds,
        usual: StepSeconds,
    ) -> tuple[Foresight, Worth]:
        """For whom drafting pays at the going rate; mends that rate."""
        count, going = len(caps), self._going
        plain_rate = count / float(usual.verify_B[0])
        draft_N: Sequence[float] = seconds.draft_N.tolist()
        # who does not draft needs to gain so many tokens more, so that noise switches nothing
        margin = self._margin
        head_start = [0.0 if slot in self._did_draft else -margin for slot in crew.slots]
        while True:
            worth = Worth(
                second=going.lift(count) * plain_rate,
                token_seconds=seconds.of_token(going.budget(count), count),
                draft_seconds_N=draft_N,
            )
            found, rate = self._foresight(blocks_RHK, worth, caps, head_start, usual)
            least = plain_rate * (1.0 + (margin if all(head_start) else 0.0))
            if found.drafting and rate <= least:
                found = Foresight(drafting=(), verified=0.0, accepted=0.0, gains_R=found.gains_R)
                rate = plain_rate
            is_new = going.is_new(count)
            budget = found.verified if found.drafting else going.budget(count)
            going.decided(count, lift=rate / plain_rate, budget=budget)
            if not is_new:
                return found, worth

    @property
    def _margin(self) -> float:
        """The policy's, and more while costs and survivals are those of another day: what looks
        best among guesses is guessed too well."""
        return self.policy.margin + _FIRST_MARGIN * max(1.0 - self._num_steps / _FIRST_STEPS, 0.0)

    def _foresight(
        self,
        blocks_RHK: Blocks,
        worth: Worth,
        caps: Sequence[int],
        head_start: Sequence[float],
        usual: StepSeconds,
    ) -> tuple[Foresight, float]:
        """Who should draft, and the tokens/s of such a step without prompts."""
        count = len(caps)
        if count == 1:  # nobody else whom its seconds could serve: its own rate decides
            verify_B: list[float] = usual.verify_B.tolist()
            (rows,) = blocks_RHK.tolist()
            found, seconds = foresee_alone(rows, verify_B, caps[0], worth=worth.second)
            seconds += worth.draft_seconds_N[len(found.drafting)]
            return found, (count + found.accepted) / seconds
        if count <= _FEW_BLOCKS:
            found = foresee_few(blocks_RHK.tolist(), worth, caps, head_start=head_start)
        else:
            found = foresee(blocks_RHK, worth, np.array(caps), head_start_R=np.array(head_start))
        tokens, drafting = count + found.accepted, len(found.drafting)
        return found, tokens / usual.of_step(drafting, found.verified if drafting else 0.0)

    def _trust(self, crew: Crew) -> tuple[Sequence[float], Survivals | None]:
        """By class, and by request; nothing where all are believed."""
        trusts = [hindsight.trust for hindsight in self._hindsight]
        if all(trust == 1.0 for trust in trusts):
            return (), None
        return trusts, np.array(trusts, dtype=np.float32)[crew.class_R, None]

    def _budgeted(
        self,
        blocks_RHK: Blocks,
        caps: Sequence[int],
        seconds: StepSeconds,
        drafting: Sequence[int],
        floors_R: Floats | None,
    ) -> tuple[Choice, Sequence[int]]:
        """The budget that the mean of recent blocks calls for; floors may ask for drafts."""
        able = [r for r, cap in enumerate(caps) if cap > 0]
        group = able if floors_R is not None else drafting
        caps_R = np.zeros(len(caps), dtype=np.int64)
        caps_R[list(group)] = [caps[r] for r in group]  # an empty tuple would mean all
        is_plain_a_choice = floors_R is not None or not group
        prices = Prices(
            seconds_B=seconds.verify_B + seconds.draft_N[len(group)],
            num_certain=len(caps),
            plain_seconds=float(seconds.verify_B[0]) if is_plain_a_choice else None,
        )
        means_RK = blocks_RHK.mean(1)
        choice = choose_budget(
            means_RK,
            prices,
            Limits(caps_R=caps_R, floors_R=floors_R),
            incumbent=self._budget,
            margin=self.policy.margin,
        )
        self._budget = choice.budget
        return choice, group if choice.budget else ()

    def _probed(
        self,
        outlook: Outlook,
        caps: Sequence[int],
        drafting: Sequence[int],
        foresight: Foresight,
        worth: Worth,
    ) -> tuple[Sequence[int], float | None]:
        """Some who would not draft, to see how it stands with them, as far as it is affordable; and
        what the cheapest would lose if it is not."""
        if len(drafting) == len(caps):
            return (), None
        chosen = set(drafting)
        left = [r for r, cap in enumerate(caps) if cap > 0 and r not in chosen]
        members = [self._members[outlook.slots[r]] for r in left]
        found = candidates(
            [member.drafted_at for member in members], [outlook.rounds[r] for r in left]
        )
        picked = [left[i] for i in found[:MOST_PROBED]]
        drafts_N, now, loss = worth.draft_seconds_N, len(drafting), None
        while picked:
            more = drafts_N[now + len(picked)] - drafts_N[now]
            loss = worth.second * more - sum(foresight.gains_R[r] for r in picked)
            if not drafting:
                loss *= PROBE
            loss += worth.second * self._catch_up_each * len(picked)
            if self._probes.affords(loss):
                return picked, None
            # a first request costs most of the drafter's part: then all at once, or none
            picked = picked[: len(picked) // 2] if drafting else []
        return (), loss

    def _find_search(self, crew: Crew) -> Search:
        if self.policy.search is not None:
            return self.policy.search
        return Search.FREE if crew.has_fixed_text else Search.PRICED

    def _take_in(self) -> None:
        """Learns from the steps that ended since the last time."""
        pending, self._pending = self._pending, []
        for step, outcome in pending:
            step.settle()
            self._probes.earn(len(outcome.accepted) + sum(outcome.accepted))
            if step.logits_RK is not None:
                self._learn(step, outcome)
            # a step behind one of the other kind finds its weights out of the caches
            is_warm = (step.num_drawn > 0) == self._drafted_last
            self._drafted_last = step.num_drawn > 0
            if is_warm and outcome.seconds is not None and outcome.num_prompt_tokens == 0:
                self.costs.observe(
                    num_requests=len(step.outlook.slots),
                    num_drafting=step.num_drawn,
                    num_tokens=len(step.outlook.slots) + sum(step.lengths),
                    context=step.outlook.context,
                    draft_seconds=outcome.draft_seconds or 0.0,
                    verify_seconds=outcome.verify_seconds or 0.0,
                    sampled=step.decision.crew.sampled,
                )

    def _learn(self, step: _Step, outcome: Outcome) -> None:
        assert step.logits_RK is not None
        # who copies learns by itself how right it is
        crew, rows = step.decision.crew, step.drawn
        crew.drafted(rows, step.outlook.rounds)
        if step.decision.probed:
            self._charge(step, outcome)
        for index in set(crew.classes):
            own = rows
            if len(crew.class_R) > 1:
                own = [r for r in rows if crew.classes[r] == index]
            if own:
                self._learn_class(index, own, step, outcome)

    def _learn_class(self, index: int, rows: Sequence[int], step: _Step, outcome: Outcome) -> None:
        """From the rounds of requests whose confidences are calibrated together."""
        assert step.logits_RK is not None
        # an answer that ended in its block tells little of what was said
        whole = [r for r in rows if outcome.verified[r] == step.lengths[r]]
        trusts = step.decision.trusts
        said = sum([step.expected_R[r] for r in whole]) / (trusts[index] if trusts else 1.0)
        self._hindsight[index].add(said, sum([outcome.accepted[r] for r in whole]))
        rounds = Rounds(rows, step.logits_RK, step.planned, outcome.verified, outcome.accepted)
        if self.calibration.observe(rounds, index):
            self._hindsight[index].forget()

    def _charge(self, step: _Step, outcome: Outcome) -> None:
        """What a probe lost, all told.

        Time as it was measured: a drafter that rested finds weights and pages cold and words that
        wait for it, which no table of steady steps knows.
        """
        decision, probed = step.decision, step.decision.probed
        drafts_N, worth = decision.worth.draft_seconds_N, decision.worth
        others = len(decision.drafting) - len(probed)
        verified = sum(step.lengths[r] for r in probed)
        accepted = sum(outcome.accepted[r] for r in probed)
        seconds = drafts_N[len(decision.drafting)] - drafts_N[others]
        seconds += verified * worth.token_seconds
        if outcome.seconds is not None and outcome.num_prompt_tokens == 0:
            without = decision.seconds.of_step(others, sum(step.lengths) - verified)
            usual = outcome.seconds - outcome.catch_up_seconds
            seconds = min(usual - without, _DEAREST_PROBE * seconds)
        seconds += outcome.catch_up_seconds
        # a probe's second step has nothing to make up for
        each = outcome.catch_up_seconds / len(probed)
        self._catch_up_each = max(each, 0.5 * self._catch_up_each)
        self._probes.lost(worth.second * seconds - accepted)

    def _predicted_seconds(self, step: _Step) -> float | None:
        """`None` where a decision was patched over prompts: nobody looked up what they cost."""
        if step.decision.is_guess:
            return None
        return step.decision.seconds.of_step(step.num_drawn, sum(step.lengths))

    def _record(self, step: _Step, outcome: Outcome) -> PlanRecord:
        decision = step.decision
        if step.survivals is not None:
            step.settle()
        why = "drafted" if step.drafting else "plain"
        if step.drafting and decision.probed:
            why = "probe"
        if step.planned and step.planned != step.lengths:
            why = "explored"
        return PlanRecord(
            num_requests=len(step.outlook.slots),
            num_drafting=len(step.drafting),
            num_prompt_tokens=outcome.num_prompt_tokens,
            lengths=step.lengths,
            accepted=outcome.accepted,
            why=why,
            plain_rate=decision.plain_rate,
            predicted_tokens=step.outlook.num_certain + sum(step.expected_R),
            predicted_seconds=self._predicted_seconds(step),
            seconds=outcome.seconds,
            curve=decision.curve,
        )
