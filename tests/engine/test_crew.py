"""The requests of a step: who is verified in full, and when."""

from dspark.algorithms.online_calibration import next_explored
from dspark.core import SamplingParams
from dspark.engine.crew import Crew, Member

SHARE = 0.05


def test_every_planned_round_is_found_though_rounds_are_not_looked_at_one_by_one() -> None:
    """Members stand at different rounds and rise together; steps without a draft are passed over,
    and what was planned in one of them is not made up for."""
    num_members, num_steps = 5, 400
    begun = [0, 7, 30, 2, 90]
    members = [Member.of(SamplingParams(), seed, SHARE) for seed in range(num_members)]
    crew = Crew(list(range(num_members)), members)
    found, expected = set(), set()
    planned = [next_explored(seed, 0, SHARE) for seed in range(num_members)]
    for step in range(num_steps):
        if step % 11 > 7:
            continue
        rounds = [first + step for first in begun]
        found |= {(index, rounds[index]) for index in crew.explores(rounds, SHARE)}
        for index, number in enumerate(rounds):
            if planned[index] <= number:
                if planned[index] == number:
                    expected.add((index, number))
                share = min(SHARE, 0.1 / num_members)
                planned[index] = next_explored(index, number + 1, share)
    assert found == expected
    assert len(found) > 10
