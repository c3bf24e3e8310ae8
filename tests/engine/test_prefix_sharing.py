"""Requests that begin with the same words share pages; nothing that they say or draft changes."""

from typing import Any

import pytest
import torch

from dspark.core import Request, SamplingParams
from dspark.engine.cycle import Cycle
from dspark.engine.draft_pass import DraftPass
from dspark.engine.prompt_lookup import PromptLookup
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target
from tests.engine.toy_cycles import (
    assert_same,
    decode_slowly,
    make_cycle,
    packed,
    rounds_of_one,
    run,
)
from tests.toys import VOCAB_SIZE, toy_chain, toy_drafter, toy_target

SYSTEM = [1, *(3 + 7 * i % 40 for i in range(22))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True, seed=4)


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def drafters(target: Target) -> dict[str, Any]:
    return {
        "none": None,
        "modules": toy_drafter(target),
        "packed": packed(toy_drafter(target)),
        "eagle3": toy_chain(target, DrafterKind.EAGLE3),
        "mtp": toy_chain(target, DrafterKind.MTP),
        "lookup": PromptLookup(block_size=4),
    }


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["none", "modules", "packed", "eagle3", "mtp", "lookup"])
def test_text_and_acceptance_after_a_hit_equal_those_without(
    target: Target, name: str, params: SamplingParams
) -> None:
    """UC-048, UC-062: the drafter's context comes with the pages."""
    drafter = drafters(target)[name]
    cycle = make_cycle(target, drafter)
    for tail in ([9, 8], [30], [9, 8], [9, 8, 7, 6, 5, 4, 3]):
        found = rounds_of_one(cycle, [*SYSTEM, *tail], params)
        cold = make_cycle(target, drafter, prefix_cache=False)
        expected = rounds_of_one(cold, [*SYSTEM, *tail], params)
        assert expected[0].num_cached == 0
        assert_same(found, expected)
    assert cycle.load.total_cached_tokens == 20 + 24 + 24
    assert found[0].num_cached == 24
    assert all(item.num_cached == 0 for item in found[1:])
    assert cycle.load.total_prompt_tokens == 25 + 24 + 25 + 30
    assert not cold.load.num_cached_pages


def test_a_hit_leaves_the_last_token_of_the_prompt_to_run(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target))
    prompt = SYSTEM[:16]  # four whole pages
    assert [rounds_of_one(cycle, prompt, GREEDY)[0].num_cached for _ in range(2)] == [0, 12]
    assert rounds_of_one(cycle, [*prompt, 5], GREEDY)[0].num_cached == 16


def test_what_was_said_is_known_to_the_next_turn(target: Target) -> None:
    """A chat goes on: prompt, answer and a new question."""
    cycle = make_cycle(target, packed(toy_drafter(target)))
    answer = [t for item in rounds_of_one(cycle, SYSTEM, GREEDY) for t in item.token_ids]
    again = [*SYSTEM, *answer, 11, 12]
    rounds = rounds_of_one(cycle, again, GREEDY)
    assert rounds[0].num_cached == (len(SYSTEM) + len(answer) - 1) // 4 * 4
    assert_same(rounds, rounds_of_one(make_cycle(target, toy_drafter(target)), again, GREEDY))


def test_a_running_request_shares_what_it_has_read(target: Target) -> None:
    """And the context of a drafter that is fed late is written before anybody drafts on it."""
    drafter = packed(toy_drafter(target))
    cycle = make_cycle(target, drafter)
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, max_draft=0)
    cycle.submit(Request(id="first", prompt_ids=[*SYSTEM, 5], params=plain))
    for _ in range(6):
        cycle.step()
    assert isinstance(cycle._proposer, DraftPass)
    assert cycle._proposer._pending
    (first,) = cycle._live
    prompt = [*first.tokens[:-1], 3, 3]
    cycle.submit(Request(id="second", prompt_ids=prompt, params=GREEDY))
    rounds = [item for _ in range(9) for item in cycle.step().rounds if item.request_id == "second"]
    assert rounds[0].num_cached == (len(prompt) - 3) // 4 * 4 > len(SYSTEM)
    cold = rounds_of_one(make_cycle(target, drafter, prefix_cache=False), prompt, GREEDY)
    assert_same(rounds, cold[: len(rounds)])
    assert any(item.num_offered for item in rounds)


@pytest.mark.parametrize("name", ["modules", "packed", "eagle3"])
def test_a_drafter_that_lost_its_context_is_noticed(target: Target, name: str) -> None:
    """The comparison above can fail: pages of the target alone do not pass it."""
    drafter = drafters(target)[name]
    cycle = make_cycle(target, drafter)
    rounds_of_one(cycle, [*SYSTEM, 9, 8], GREEDY)
    proposer: Any = cycle._proposer
    lost = [*proposer._pages.keys, *proposer._pages.values, getattr(proposer, "_states", None)]
    for pages in lost:
        if pages is not None:
            pages.zero_()
    found = rounds_of_one(cycle, [*SYSTEM, 9, 8], GREEDY)
    cold = rounds_of_one(make_cycle(target, drafter), [*SYSTEM, 9, 8], GREEDY)
    assert found[0].token_ids == cold[0].token_ids
    with pytest.raises(AssertionError):
        assert_same(found, cold)


def test_hidden_drafts_after_a_hit_equal_those_of_a_fresh_drafter(target: Target) -> None:
    """Not only what is accepted: every slot of the block."""
    drafter = toy_drafter(target)
    prompt = [*SYSTEM, 5, 6]
    hidden = []
    for is_warm in (False, True):
        cycle = make_cycle(target, drafter)
        if is_warm:
            rounds_of_one(cycle, [*SYSTEM, 9], GREEDY)
        cycle.submit(Request(id="0", prompt_ids=prompt, params=GREEDY))
        cycle.step()
        (live,) = cycle._live
        assert live.num_cached == (20 if is_warm else 0)
        with torch.inference_mode():
            assert isinstance(cycle._proposer, DraftPass)
            table = live_table(cycle)
            hidden.append(cycle._proposer._backbone([live], cycle._cache, table))
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-4, rtol=1e-4)


def live_table(cycle: Cycle) -> Any:
    from dspark.engine.live_request import round_table

    return round_table(cycle._live, device=cycle._target.device)


def test_requests_that_come_together_read_their_common_words_once(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target), max_requests=6)
    prompts = [[*SYSTEM, 9 + i] for i in range(6)]
    for index, prompt in enumerate(prompts):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=GREEDY))
    answers: dict[str, list[int]] = {str(i): [] for i in range(6)}
    num_read = 0
    while cycle.has_work:
        result = cycle.step()
        num_read += result.num_prompt_tokens
        for item in result.rounds:
            answers[item.request_id].extend(item.token_ids)
    assert num_read == len(prompts[0]) + 5 * (len(prompts[0]) - 20)
    assert list(answers.values()) == [decode_slowly(target, prompt, 14) for prompt in prompts]
    assert cycle.load.total_cached_tokens == 5 * 20


def test_who_waits_for_anothers_page_reads_it_alone_if_that_one_goes(target: Target) -> None:
    cycle = make_cycle(target, None, max_step_tokens=6)
    for index in range(2):
        cycle.submit(Request(id=str(index), prompt_ids=[*SYSTEM, 9 + index], params=GREEDY))
    cycle.step()
    assert cycle.abort("0")
    tokens = []
    while cycle.has_work:
        tokens.extend(t for item in cycle.step().rounds for t in item.token_ids)
    assert tokens == decode_slowly(target, [*SYSTEM, 10], 14)


def test_pages_are_forgotten_when_they_are_needed(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target), num_positions=64)
    prompts = [[1 + (i * 7 + j) % (VOCAB_SIZE - 2) for j in range(20)] for i in range(8)]
    for _ in range(2):
        for prompt in prompts:
            assert run(cycle, [prompt], GREEDY) == [decode_slowly(target, prompt, 14)]
    assert cycle.load.num_free_pages + cycle.load.num_cached_pages == 16
    assert cycle.load.total_cached_tokens == 0
