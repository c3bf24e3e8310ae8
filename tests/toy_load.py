"""A toy engine under load whose clock is a formula: the real cycle, a drafter of known skill.

The target's next token depends on the last one alone, so that an oracle can draft any number of
right tokens; how many are right at a place, and how confident it is, are functions of the place.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import StepCost, VerifyRow
from dspark.benchmarks.journal import Cell, PromptRecord
from dspark.benchmarks.load.deck import Task
from dspark.benchmarks.load.planners import planner_of
from dspark.benchmarks.load.results import Answer
from dspark.core import DraftBlock, Request, RoundResult, SamplingParams, StepResult
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.kv_cache import KVCache
from dspark.engine.live_request import LiveRequest
from dspark.engine.planner import Planner
from dspark.engine.proposer import StepStates
from dspark.models.target import Target
from tests.toys import VOCAB_SIZE, toy_drafter, toy_target

BLOCK_SIZE = 4


def bigram_target() -> Target:
    """A target whose next token is a function of the last one."""
    return toy_target(layer_scale=0.0)


def next_tokens(target: Target) -> list[int]:
    """The greedy successor of each token."""
    with torch.inference_mode():
        hidden = target.states([torch.arange(VOCAB_SIZE)], tap_layers=()).hidden_ND
        return target.logits(hidden).argmax(1).tolist()


def tasks(num_tasks: int = 6, *, length: int = 5) -> list[Task]:
    """Prompts of three domains, all different."""
    return [
        Task(
            domain=("math", "code", "chat")[index % 3],
            prompt_ids=[3 + (7 * index + 5 * i) % (VOCAB_SIZE - 4) for i in range(length)],
        )
        for index in range(num_tasks)
    ]


@dataclass(slots=True)
class OracleDraft:
    """Right for as many slots as the place says, and confident accordingly."""

    successors: Sequence[int]
    block_size: int = BLOCK_SIZE
    tap_layers: tuple[int, ...] = ()
    vocabulary: None = None

    def feed(self, states: StepStates) -> None:
        pass

    def look(self, _requests: Sequence[LiveRequest]) -> dict[int, list[float]]:
        return {}

    def catch_up(self, requests: Sequence[LiveRequest], *, cache: KVCache) -> None:
        pass

    def propose(
        self, requests: Sequence[LiveRequest], *, cache: KVCache, rounds: object
    ) -> DraftBlock:
        rows, logits = [], []
        for live in requests:
            chances = self._chances(live)
            row, token, is_right = [], live.tokens[-1], True
            for slot, chance in enumerate(chances):
                token = self.successors[token]
                is_right &= _noise(live, slot) < chance
                row.append(token if is_right else (token + 1) % VOCAB_SIZE)
            rows.append(row)
            logits.append([np.log(chance / (1.0 - chance)) for chance in chances])
        return DraftBlock(
            tokens_RK=torch.tensor(rows),
            probs_RKS=None,
            confidence_RK=torch.tensor(logits, dtype=torch.float32),
        )

    def _chances(self, live: LiveRequest) -> list[float]:
        """Easy stretches and hard ones of the answer."""
        is_easy = _noise(live, 99) < 0.5
        return [(0.9 if is_easy else 0.35) * 0.97**slot for slot in range(self.block_size)]


def _noise(live: LiveRequest, salt: int) -> float:
    """In [0, 1), by the place alone."""
    key = f"{len(live.tokens)} {live.tokens[:2]} {salt}".encode()
    return zlib.crc32(key, 7) / 2**32


Seconds = Callable[[int, int, int], float]
"""Of a step by requests that decode, requests that draft, target tokens."""


def staircase(requests: int, drafting: int, tokens: int) -> float:
    """Plain steps of 10 ms, shelves of 8 tokens, a drafter of 2 ms and 0.1 ms a request."""
    draft = 2e-3 + 1e-4 * drafting if drafting else 0.0
    return 10e-3 + 1e-4 * requests + 4e-3 * (-(-tokens // 8)) + draft


def profile(seconds: Seconds = staircase) -> StepCost:
    """What a profile of that machine finds."""
    rows = []
    for requests in (1, 2, 4, 8, 16):
        sizes = [n for n in range(1, 129) if n <= 2 or n % 8 in (0, 1)]
        values = [seconds(requests, 0, n) for n in sizes]
        rows.append(VerifyRow(num_requests=requests, curve=_curve(sizes, values)))
    ladder = [1, 2, 4, 8, 16]
    drafts = [seconds(1, n, 1) - seconds(1, 0, 1) for n in ladder]
    return StepCost(
        fingerprint=Fingerprint.of(source="toy"),
        block_size=BLOCK_SIZE,
        context=0,
        draft=_curve(ladder, drafts),
        verify=tuple(rows),
    )


def _curve(sizes: Sequence[int], seconds: Sequence[float]) -> CostCurve:
    return CostCurve(sizes=tuple(sizes), seconds=tuple(seconds), errors=(0.0,) * len(sizes))


@dataclass(slots=True)
class FakeClock:
    """Stands still but for what is added."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class TimedEngine:
    """A real cycle whose steps take as long as a formula says."""

    cycle: Cycle
    clock: FakeClock
    seconds: Seconds = staircase
    steps: list[StepResult] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return self.cycle.has_work

    def submit(self, request: Request) -> None:
        self.cycle.submit(request)

    def abort(self, request_id: str) -> bool:
        return self.cycle.abort(request_id)

    def step(self) -> StepResult:
        result = self.cycle.step()
        rounds = [item for item in result.rounds if not item.is_prefill]
        drafting = sum(item.num_offered > 0 for item in rounds)
        num_tokens = result.num_verify_tokens + result.num_prompt_tokens
        self.clock.now += self.seconds(len(rounds), drafting, num_tokens)
        self.steps.append(result)
        return result


def config_of(num_users: int) -> CycleConfig:
    return CycleConfig(
        max_requests=num_users,
        num_positions=num_users * 64,
        page_size=8,
        max_step_tokens=64,
    )


@dataclass(slots=True)
class ToyEngines:
    """Opens timed engines by policy (`benchmarks.load.sweep.Engines`); all share one clock."""

    target: Target
    clock: FakeClock = field(default_factory=FakeClock)
    seconds: Seconds = staircase
    max_new_tokens: int = 24
    planners: dict[str, Planner] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)

    def open(self, policy: str, *, num_users: int) -> TimedEngine:
        """A fresh engine; its planner is the one that the policy had before."""
        self.opened.append(policy)
        if policy not in self.planners:
            self.planners[policy] = toy_planner(policy, profile(self.seconds))
        return self._engine(self.planners[policy], num_users, is_plain=policy == "none")

    def step_cost(self, *, num_users: int) -> StepCost | None:
        """As `LocalEngines` gives it."""
        planner = self.planners.get("auto")
        return planner.costs.table(num_users) if isinstance(planner, AdaptivePlanner) else None

    def beside(self, *, num_users: int, temperature: float) -> "ToyBeside":
        """Rounds of the formula's machine."""
        return ToyBeside(self.seconds)

    def answers(self, tasks: Sequence[Task], *, temperature: float) -> Iterator[Answer]:
        """Whole blocks, one prompt after the other."""
        for index, task in enumerate(tasks):
            engine = self._engine(toy_planner("fixed", profile(self.seconds)), 1, is_plain=False)
            params = SamplingParams(
                temperature=temperature, max_tokens=self.max_new_tokens, ignore_eos=True
            )
            engine.submit(Request(id="a", prompt_ids=task.prompt_ids, params=params))
            while engine.has_work:
                engine.step()
            rounds = [item for step in engine.steps for item in step.rounds]
            yield answer_of(index, task, rounds, temperature=temperature)

    def _engine(self, planner: Planner, num_users: int, *, is_plain: bool) -> TimedEngine:
        drafter = None if is_plain else toy_drafter(self.target, block_size=BLOCK_SIZE)
        config = config_of(num_users)
        cycle = Cycle(self.target, drafter=drafter, config=config, planner=planner)
        if not is_plain:
            cycle._proposer = OracleDraft(next_tokens(self.target))
        return TimedEngine(cycle, self.clock, self.seconds)


@dataclass(slots=True)
class ToyBeside:
    """What a profile beside a load finds of a machine that is a formula."""

    seconds: Seconds
    num_rounds: int = 0

    def take(self) -> None:
        self.num_rounds += 1

    def table(self) -> StepCost | None:
        num_rounds, self.num_rounds = self.num_rounds, 0
        return profile(self.seconds) if num_rounds else None


def toy_planner(policy: str, cost: StepCost) -> Planner:
    """The planner that a name stands for."""
    return planner_of(policy, block_size=BLOCK_SIZE, cost=lambda: cost, calibration=None)


def answer_of(
    index: int, task: Task, rounds: Sequence[RoundResult], *, temperature: float
) -> Answer:
    """What `LLM` would have recorded of these rounds."""
    cell = Cell(
        drafter="oracle", weights="w", temperature=temperature, width=None, task=task.domain
    )
    record = PromptRecord.of_rounds(
        cell,
        rounds,
        index=index,
        prompt=str(index),
        seconds=0.0,
        num_prompt_tokens=len(task.prompt_ids),
    )
    return Answer(record=record, token_ids=[t for item in rounds for t in item.token_ids])
