"""Prompts that share a beginning meet on one replica, and never all on one."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dspark.cluster.prefix_directory import PrefixDirectory

SYSTEM = "You are a helpful assistant. " * 40


def test_a_prompt_follows_the_longest_beginning_that_was_seen() -> None:
    directory = PrefixDirectory()
    directory.record(SYSTEM[:600], "a")
    directory.record(SYSTEM + "and what else?", "b")
    idle = {"a": 0, "b": 0, "c": 0}
    assert directory.rank(SYSTEM + "something new", idle)[0] == "b"
    assert directory.rank(SYSTEM[:520] + "x" * 300, idle)[0] == "b"  # the last to have read it
    assert directory.rank("nothing like it", {"a": 2, "b": 1, "c": 0}) == ["c", "b", "a"]


def test_a_replica_with_more_than_its_share_is_passed_over() -> None:
    directory = PrefixDirectory(slack=0.5, spare=2)
    directory.record(SYSTEM, "a")
    assert directory.rank(SYSTEM, {"a": 5, "b": 0})[0] == "a"  # 5 <= 1.5 * 2.5 + 2
    assert directory.rank(SYSTEM, {"a": 9, "b": 0})[0] == "b"
    assert set(directory.rank(SYSTEM, {"a": 9, "b": 0})) == {"a", "b"}


def test_a_dead_replica_is_forgotten() -> None:
    directory = PrefixDirectory()
    directory.record(SYSTEM, "a")
    assert directory.rank(SYSTEM, {"b": 3, "c": 1}) == ["c", "b"]  # not there any more
    directory.forget("a")
    assert len(directory) == 0


def test_memory_is_bounded() -> None:
    directory = PrefixDirectory(capacity=10)
    for seed in range(50):
        directory.record(str(random.Random(seed).random()) * 100, "a")
    assert len(directory) == 10


@given(
    prompts=st.lists(st.text(max_size=700), min_size=1, max_size=40),
    names=st.sets(st.sampled_from("abcdef"), min_size=1),
)
def test_every_replica_is_in_the_ranking_once_and_load_stays_within_the_limit(
    prompts: list[str], names: set[str]
) -> None:
    directory = PrefixDirectory(slack=0.0, spare=1)
    loads = dict.fromkeys(sorted(names), 0)
    for prompt in prompts:
        order = directory.rank(prompt, loads)
        assert sorted(order) == sorted(names)
        directory.record(prompt, order[0])
        loads[order[0]] += 1
    assert max(loads.values()) <= sum(loads.values()) / len(loads) + 3


def test_short_prompts_have_a_beginning_too() -> None:
    directory = PrefixDirectory()
    directory.record("hello", "b")
    assert directory.rank("hello", {"a": 0, "b": 0})[0] == "b"
    directory.record("", "b")
    assert directory.rank("", {"a": 0, "b": 0})[0] == "b"
