"""The requests of a load, in an order that every policy meets alike. It knows no engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle as endlessly

import numpy as np

from dspark.core import Coupling, SamplingParams
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt as ids, and how its answer began when it was asked before."""

    domain: str
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one user asks; `age` tokens of the answer are there already, as part of the prompt."""

    domain: str
    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Deck:
    """Deals tasks: the domains in turn, in each of them a new order every time through."""

    tasks: Sequence[Task]
    temperature: float
    max_new_tokens: int
    coupling: Coupling
    seed: int
    is_whole: bool = False
    """Whether every answer has `max_new_tokens`, whatever ends it: then users end in turn, and
    equal numbers of tokens come with equal numbers of prompts."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("A load needs at least one prompt.")

    def deal(self) -> Iterator[Ask]:
        """Asks without end, always the same ones."""
        for number, task in enumerate(self._order()):
            yield self._ask(task, number, age=0)

    def deal_aged(self, num_users: int) -> Iterator[Ask]:
        """The same, the first `num_users` of them in the middle of their answers.

        Users who came one by one stand at places of their answers that are spread evenly; asked
        from the start together, they would also end together.
        """
        rng = np.random.default_rng([self.seed, num_users])
        shares = rng.permutation((np.arange(num_users) + rng.uniform()) / num_users)
        for number, task in enumerate(self._order()):
            known = min(len(task.answer_ids), self.max_new_tokens) - 1
            share = shares[number] if number < num_users else 0.0
            yield self._ask(task, number, age=int(share * max(known, 0)))

    def _order(self) -> Iterator[Task]:
        rng = np.random.default_rng(self.seed)
        by_domain: Mapping[str, Sequence[Task]] = {
            domain: [task for task in self.tasks if task.domain == domain]
            for domain in dict.fromkeys(task.domain for task in self.tasks)
        }
        decks = [_shuffled(tasks, rng) for tasks in by_domain.values()]
        for deck in endlessly(decks):
            yield next(deck)

    def _ask(self, task: Task, number: int, *, age: int) -> Ask:
        is_greedy = self.temperature == 0.0
        return Ask(
            domain=task.domain,
            prompt_ids=[*task.prompt_ids, *task.answer_ids[:age]],
            params=SamplingParams(
                temperature=self.temperature,
                max_tokens=self.max_new_tokens - age,
                ignore_eos=self.is_whole,
                seed=None if is_greedy else (self.seed * 1_000_003 + number) % 2**62,
                coupling=None if is_greedy else self.coupling,
            ),
        )


def _shuffled(tasks: Sequence[Task], rng: np.random.Generator) -> Iterator[Task]:
    while True:
        for index in rng.permutation(len(tasks)):
            yield tasks[index]
