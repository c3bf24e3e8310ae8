import pytest

from dspark.benchmarks.load.config import LoadConfig, default_policies, policy_names
from dspark.errors import InputError


def test_every_unit_comes_once_and_policies_take_turns_at_being_first() -> None:
    config = LoadConfig(
        policies=("auto", "none", "mtp1"), concurrency=(1, 4), rates=(2.5,), repeats=3
    )
    units = list(config.units())
    assert len(units) == len(set(units)) == config.num_units == 3 * 2 * 3 * 3
    for number, (temperature, load) in enumerate(config.sittings()):
        sitting = units[9 * number : 9 * (number + 1)]
        assert {(u.temperature, u.load) for u in sitting} == {(temperature, load)}
        assert [u.repeat for u in sitting] == [0] * 3 + [1] * 3 + [2] * 3
    first = [
        next(u.policy for u in units if (u.repeat, u.load, u.temperature) == (r, load, 1.0))
        for load in config.loads
        for r in range(3)
    ]
    assert {name: first.count(name) for name in config.policies} == dict.fromkeys(
        config.policies, 3
    )


def test_names_are_split_at_commas_but_not_inside_a_table() -> None:
    assert policy_names("auto, none,table:4=5,16=3,64=1,fixed:3") == [
        "auto",
        "none",
        "table:4=5,16=3,64=1",
        "fixed:3",
    ]


def test_the_default_policies_are_the_scheduler_and_all_that_it_must_beat() -> None:
    assert default_policies(3) == ["auto", "none", "mtp1", "fixed:2", "fixed:3", "threshold:0.5"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": (0,)}, "above 0"),
        ({"concurrency": (2, 2)}, "different"),
        ({"concurrency": ()}, "give --concurrency or --rates"),
        ({"policies": ("none", "none")}, "once"),
        ({"repeats": 0}, "at least 1"),
        ({"unit_s": 0.0}, "above 0"),
        ({"budget_minutes": -1.0}, "above 0"),
        ({"temperatures": (-1.0,)}, "temperature"),
    ],
)
def test_impossible_sweeps_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoadConfig(**{"policies": ("none",), **changes})  # type: ignore[arg-type]
