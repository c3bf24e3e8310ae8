"""The requests of a step, and what a planner keeps of each. It decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.algorithms.calibration import SamplingClass
from dspark.algorithms.online_calibration import next_explored
from dspark.algorithms.ranking import Floats, Ints
from dspark.core import Coupling, SamplingParams
from dspark.engine.live_calibration import LiveCalibration

_EXPLORED_A_STEP = 0.1
"""Rounds of a step that are verified in full for calibration's sake, on average, at most."""


@dataclass(slots=True, eq=False)
class Member:
    """A request."""

    sampling_class: int
    is_sampled: bool
    has_fixed_text: bool
    """Whether its text does not depend on what is verified."""
    floor: float
    seed: int
    explored: int
    """The next round that is verified in full; rounds without a draft are not made up for."""
    drafted_at: int | None = None
    """The last round that drafted."""

    @classmethod
    def of(cls, params: SamplingParams, seed: int, share: float) -> "Member":
        """A request that begins."""
        is_shared = params.effective_coupling is Coupling.SHARED_NOISE
        return cls(
            sampling_class=LiveCalibration.index(SamplingClass.of(params)),
            is_sampled=not params.is_greedy,
            has_fixed_text=params.is_greedy or is_shared,
            floor=params.min_tokens_per_s,
            seed=seed,
            explored=next_explored(seed, 0, share),
        )


class Crew:
    """Members that take part in steps together, with what follows from all of them."""

    def __init__(self, slots: list[int], members: Sequence[Member]) -> None:
        self.slots = slots
        self.members = members
        self.classes = [member.sampling_class for member in members]
        self.has_fixed_text = all(member.has_fixed_text for member in members)
        self.sampled = sum([member.is_sampled for member in members]) / len(members)
        """Share of them."""
        floors = [member.floor for member in members]
        self.floors_R: Floats | None = np.array(floors) if any(floors) else None
        self.class_R: Ints = np.array(
            self.classes if len(set(self.classes)) > 1 else [self.classes[0]]
        )
        self._explored = [member.explored for member in members]
        self._none_before = 0
        """Nobody explores before the first member has had so many rounds."""

    def drafted(self, indices: Sequence[int], rounds: Sequence[int]) -> None:
        """These drafted in these rounds of theirs; `rounds` of all."""
        for index in indices:
            self.members[index].drafted_at = rounds[index]

    def explores(self, rounds: Sequence[int], share: float) -> list[int]:
        """Indices of those whose round is to be verified in full; the next ones are drawn.

        Each is drawn long before its block, by the number of requests and the seed alone. The
        rounds of members that take part together rise together: usually one of them is looked at.
        """
        if rounds[0] < self._none_before:
            return []
        now = []
        for index, (planned, number) in enumerate(zip(self._explored, rounds, strict=True)):
            if planned > number:
                continue
            if planned == number:
                now.append(index)
            member = self.members[index]
            least = min(share, _EXPLORED_A_STEP / len(self.members))
            member.explored = next_explored(member.seed, number + 1, least)
            self._explored[index] = member.explored
        steps = min([at - number for at, number in zip(self._explored, rounds, strict=True)])
        self._none_before = rounds[0] + steps
        return now
