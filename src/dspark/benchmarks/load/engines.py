"""Engines of one model in this process, each with pages of its own: where a load sweep gets them.

It builds a cycle for so many users and a policy; it puts no load on it.
"""

import gc
import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence

from dspark.algorithms.policies import Adaptive, parse_policy
from dspark.algorithms.step_cost import StepCost
from dspark.benchmarks.journal import Cell, PromptRecord
from dspark.benchmarks.load.config import NONE, LoadConfig
from dspark.benchmarks.load.deck import Task
from dspark.benchmarks.load.planners import planner_of
from dspark.benchmarks.load.results import Answer
from dspark.core import Coupling, Request, RoundResult, SamplingParams
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.cycle import Cycle, CycleConfig
from dspark.engine.planner import Planner
from dspark.engine.side_profile import SideProfile
from dspark.llm import LLM

_ANSWERED_TOGETHER = 8
_WHOLE = "fixed"


class LocalEngines:
    """Cycles of an `LLM` (`load.sweep.Engines`)."""

    def __init__(
        self, llm: LLM, *, tasks: Sequence[Task], config: LoadConfig, weights: str
    ) -> None:
        """`weights`: hash of the drafter's files, for the records."""
        self._llm = llm
        self._config = config
        self._weights = weights
        lengths = [len(task.prompt_ids) for task in tasks]
        longest, self._usual_prompt = max(lengths), int(statistics.median(lengths))
        self._num_positions = longest + config.max_new_tokens + llm.block_size
        self._planners: dict[str, Planner] = {}

    def open(self, policy: str, *, num_users: int) -> Cycle:
        """An engine for so many requests at a time; plain decoding has no drafter at all."""
        if policy not in self._planners:
            self._planners[policy] = planner_of(
                policy,
                block_size=self._llm.block_size,
                cost=self._llm.step_cost,
                calibration=self._llm.calibration,
            )
        planner = self._planners[policy]
        return self._open(planner, num_users=num_users, is_plain=policy == NONE)

    def step_cost(self, *, num_users: int) -> StepCost | None:
        """What the first policy that weighs costs has found steps to take, of late."""
        for planner in self._planners.values():
            if isinstance(planner, AdaptivePlanner):
                return planner.costs.table(num_users)
        return None

    def beside(self, *, num_users: int, temperature: float) -> SideProfile | None:
        """Steps of so many requests that read prompts as long as the tasks'."""
        llm, config = self._llm, self._config
        weighs_costs = any(isinstance(parse_policy(name), Adaptive) for name in config.policies)
        if llm.drafter is None or not weighs_costs:
            return None
        gc.collect()
        return SideProfile(
            llm.target,
            llm.drafter,
            cost=llm.step_cost(),
            num_requests=num_users,
            num_prompt_tokens=self._usual_prompt,
            max_step_tokens=config.max_step_tokens,
            params=SamplingParams(temperature=temperature, coupling=self._coupling(temperature)),
            clock=time.perf_counter,
        )

    def answers(self, tasks: Sequence[Task], *, temperature: float) -> Iterator[Answer]:
        """Each task answered once, every block verified whole, as they end."""
        planner = planner_of(
            _WHOLE, block_size=self._llm.block_size, cost=self._llm.step_cost, calibration=None
        )
        cycle = self._open(planner, num_users=_ANSWERED_TOGETHER, is_plain=False)
        for index, task in enumerate(tasks):
            cycle.submit(self._request(index, task, temperature))
        rounds: dict[str, list[RoundResult]] = {str(i): [] for i in range(len(tasks))}
        while cycle.has_work:
            for item in cycle.step().rounds:
                rounds[item.request_id].append(item)
                if item.finish_reason is not None:
                    index = int(item.request_id)
                    yield self._answer(index, tasks[index], rounds[item.request_id], temperature)

    def _open(self, planner: Planner, *, num_users: int, is_plain: bool) -> Cycle:
        page_size = CycleConfig().page_size
        pages = -(-self._num_positions // page_size)
        gc.collect()  # pages that nobody holds go before new ones come
        return Cycle(
            self._llm.target,
            drafter=None if is_plain else self._llm.drafter,
            config=CycleConfig(
                max_requests=num_users,
                num_positions=num_users * pages * page_size,
                max_step_tokens=self._config.max_step_tokens,
                max_prompt_tokens=self._config.max_step_tokens,
                copies=self._llm.config.copies,
                prefix_cache=False,  # tasks come back, and every policy shall read each of them
            ),
            planner=planner,
            clock=time.perf_counter,
        )

    def _request(self, index: int, task: Task, temperature: float) -> Request:
        is_greedy = temperature == 0.0
        params = SamplingParams(
            temperature=temperature,
            max_tokens=self._config.max_new_tokens,
            ignore_eos=True,
            seed=None if is_greedy else self._config.seed + index,
            coupling=self._coupling(temperature),
        )
        return Request(id=str(index), prompt_ids=task.prompt_ids, params=params)

    def _coupling(self, temperature: float) -> Coupling | None:
        return None if temperature == 0.0 else self._config.coupling

    def _answer(
        self, index: int, task: Task, rounds: Sequence[RoundResult], temperature: float
    ) -> Answer:
        cell = Cell(
            drafter="load",
            weights=self._weights,
            temperature=temperature,
            width=None,
            task=task.domain,
        )
        record = PromptRecord.of_rounds(
            cell,
            rounds,
            index=index,
            prompt=hashlib.sha256(repr(list(task.prompt_ids)).encode()).hexdigest()[:16],
            seconds=0.0,
            num_prompt_tokens=len(task.prompt_ids),
        )
        return Answer(record=record, token_ids=[t for item in rounds for t in item.token_ids])
