"""Traffic in miniature: requests of all kinds come, go and are given up, in too small a cache.

Every answer that ends is the one that its request gets alone, and nothing is left behind.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dspark.algorithms.policies import Adaptive
from dspark.core import Request, SamplingParams
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.cycle import Cycle
from dspark.engine.prompt_lookup import PromptLookup
from dspark.models.drafter_config import DrafterKind
from tests.algorithms.toy_costs import linear_cost
from tests.engine.test_grammar import WIDE
from tests.engine.toy_cycles import make_cycle, packed, run
from tests.toys import toy_chain, toy_drafter, toy_target

TARGET = toy_target()
BEGINNINGS = ([1], [1, 4, 9, 16, 25, 36, 4, 13, 24, 37, 5], [1, 3] * 12)
OPTIONS: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "max_draft": 0},
    {"temperature": 0.0, "num_logprobs": 2},
    {"temperature": 0.8, "seed": 3, "grammar": WIDE},
)


@cache
def alone(prompt: tuple[int, ...], option: int, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, **OPTIONS[option])
    return run(make_cycle(TARGET, None), [prompt], params)[0]


def cycle_of(name: str, **changes: Any) -> Cycle:
    drafter: Any = {
        "modules": lambda: toy_drafter(TARGET),
        "packed": lambda: packed(toy_drafter(TARGET)),
        "eagle3": lambda: toy_chain(TARGET, DrafterKind.EAGLE3),
        "lookup": lambda: PromptLookup(block_size=4),
    }[name.removesuffix("+copies")]()
    changes.setdefault("copies", name.endswith("+copies"))
    values = {"num_positions": 108, "max_requests": 5, "max_step_tokens": 24, **changes}
    return make_cycle(TARGET, drafter, **values)


class Traffic:
    """Clients of one cycle: they ask, and some do not wait for the end."""

    def __init__(self, cycle: Cycle, seed: int) -> None:
        self.cycle, self.rng = cycle, random.Random(seed)
        self.wanted: dict[str, tuple[tuple[int, ...], int, int]] = {}
        self.found: dict[str, list[int]] = {}
        self.given_up: set[str] = set()

    def ask(self) -> None:
        rng, name = self.rng, str(len(self.wanted))
        tail = [rng.randrange(3, 40) for _ in range(rng.choice([1, 2, 9]))]
        key = ((*rng.choice(BEGINNINGS), *tail), rng.randrange(6), rng.choice([1, 6, 40]))
        params = SamplingParams(max_tokens=key[2], **OPTIONS[key[1]])
        self.wanted[name], self.found[name] = key, []
        self.cycle.submit(Request(id=name, prompt_ids=key[0], params=params))

    def give_up(self) -> None:
        name = self.rng.choice(sorted(self.found))
        if self.cycle.abort(name):
            self.given_up.add(name)
            self.cycle.check()

    def step(self) -> None:
        for item in self.cycle.step().rounds:
            assert item.request_id not in self.given_up
            self.found[item.request_id].extend(item.token_ids)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name", ["packed", "modules", "eagle3", "lookup", "packed+copies", "eagle3+copies"]
)
def test_every_answer_in_traffic_is_the_one_that_its_request_gets_alone(
    name: str, seed: int
) -> None:
    """UC-056, UC-059, UC-050: cancels at any time, restarts, hits, waits; books always true."""
    traffic = Traffic(cycle_of(name), seed)
    for _ in range(90):
        if traffic.rng.random() < 0.5:
            traffic.ask()
        if traffic.found and traffic.rng.random() < 0.15:
            traffic.give_up()
        if traffic.cycle.has_work:
            traffic.step()
    while traffic.cycle.has_work:
        traffic.step()
    for request_id, key in traffic.wanted.items():
        expected, found = alone(*key), traffic.found[request_id]
        assert found == (expected[: len(found)] if request_id in traffic.given_up else expected)
    load = traffic.cycle.load
    assert traffic.given_up
    assert load.total_sent_back > 0
    assert load.total_cached_tokens > 0
    assert load.num_free_pages + load.num_cached_pages == load.num_pages


def test_a_planner_that_decides_for_itself_lives_with_restarts() -> None:
    """Floors, caps and plans belong to requests that come back in other places."""
    cycle = cycle_of("packed", num_positions=84)
    cost = replace(linear_cost(base=2e-3, draft_base=1e-3), block_size=4)
    cycle.planner = AdaptivePlanner(Adaptive(), block_size=4, cost=cost)
    prompts = [(*BEGINNINGS[i % 3], 5 + i) for i in range(7)]
    options = [replace(SamplingParams(**OPTIONS[0]), max_tokens=30, max_draft=i) for i in range(7)]
    each = [replace(o, min_tokens_per_s=float(i % 2)) for i, o in enumerate(options)]
    for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    found: dict[str, list[int]] = {str(i): [] for i in range(7)}
    while cycle.has_work:
        for item in cycle.step().rounds:
            found[item.request_id].extend(item.token_ids)
            assert item.num_planned <= int(item.request_id)
    assert cycle.load.total_sent_back > 0
    assert list(found.values()) == [alone(prompt, 0, 30) for prompt in prompts]
