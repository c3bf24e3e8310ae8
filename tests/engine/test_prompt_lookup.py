"""Prompt lookup in the cycle: copies of the request's own text, judged like any draft."""

import math

import pytest
import torch

from dspark.core import Coupling, Origin, Request, SamplingParams
from dspark.engine.prompt_lookup import LookupPass, PromptLookup
from dspark.errors import InputError
from dspark.models.target import Target
from tests.engine.test_chain_pass import chi_square_of_pairs
from tests.engine.test_cycle import PROMPTS, decode_slowly, make_cycle, rounds_of, run
from tests.toys import toy_drafter, toy_target

LOOKUP = PromptLookup(block_size=4, min_match=1, max_match=3)


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


@pytest.mark.parametrize("width", [0, 1, 3, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(target: Target, width: int | None, temperature: float) -> None:
    """Blocks of different lengths in one batch, some of them empty."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=30, ignore_eos=True)
    expected = run(make_cycle(target, None), PROMPTS, params)
    if temperature == 0.0:
        assert expected == [decode_slowly(target, prompt, 30) for prompt in PROMPTS]
    assert run(make_cycle(target, LOOKUP, width=width), PROMPTS, params) == expected


def test_a_text_that_repeats_itself_is_accepted_in_whole_blocks(target: Target) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=42, ignore_eos=True, logit_bias={7: 1e4})
    cycle = make_cycle(target, LOOKUP)
    cycle.submit(Request(id="0", prompt_ids=[5, 6], params=params))
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    assert [token for item in rounds for token in item.token_ids] == [7] * 42
    # the first 7 comes with the prompt, the second is new to the text, then it loops
    assert [item.num_offered for item in rounds] == [0, 0, *[4] * 8]
    assert [item.num_accepted for item in rounds] == [0, 0, *[4] * 8]
    assert rounds[-1].origins == [*[Origin.ACCEPTED] * 4, Origin.BONUS]


def test_nothing_is_offered_where_nothing_matches(target: Target) -> None:
    """No window is verified for such a request, and none is counted as a rejection."""
    lookup = PromptLookup(block_size=4, min_match=3, max_match=3)
    cycle = make_cycle(target, lookup)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    cycle.submit(Request(id="0", prompt_ids=[9, 10, 11], params=params))
    cycle.step()
    (item,) = cycle.step().rounds
    assert (item.num_offered, item.num_planned, item.num_accepted) == (0, 0, 0)
    assert item.origins == [Origin.PLAIN]


def test_a_proposal_is_the_continuation_of_the_longest_match(target: Target) -> None:
    cycle = make_cycle(target, PromptLookup(block_size=3, min_match=1, max_match=3))
    forced = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={7: 1e4})
    cycle.submit(Request(id="0", prompt_ids=[5, 6, 7, 20, 21, 3, 7, 30, 5, 6], params=forced))
    cycle.step()
    proposer = cycle._proposer
    assert isinstance(proposer, LookupPass)
    block = proposer.propose(cycle._live, cache=cycle._cache, rounds=rounds_of(cycle, cycle._live))
    assert block.tokens_RK.tolist() == [[20, 21, 3]]
    assert block.is_certain
    expected = torch.tensor([[math.log(4), math.log(5), math.log(6)]])
    assert block.confidence_RK is not None
    torch.testing.assert_close(block.confidence_RK, expected)


def test_maximal_coupling_keeps_the_distribution() -> None:
    """Copied tokens are certain, the answer's distribution is the target's; alarm 1e-4."""
    target = toy_target(vocab_size=6, pad_token_id=0, eos_token_id=None, scale=3.0)
    cycle = make_cycle(target, LOOKUP, max_requests=64, num_positions=64 * 32, is_checked=False)
    params = SamplingParams(temperature=1.0, max_tokens=3, coupling=Coupling.MAXIMAL)
    num_accepted, prompt = 0, [0, 1, 2, 3, 4, 5, 1, 2]
    answers: dict[str, list[int]] = {}
    for number in range(3000):
        cycle.submit(Request(id=str(number), prompt_ids=prompt, params=params))
    while cycle.has_work:
        for item in cycle.step().rounds:
            answers.setdefault(item.request_id, []).extend(item.token_ids)
            num_accepted += item.num_accepted
    assert num_accepted > 300
    assert chi_square_of_pairs(target, prompt, list(answers.values())) > 1e-4


def test_options_that_watch_the_text_see_the_copied_words(target: Target) -> None:
    """UC-031, UC-034."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        ignore_eos=True,
        repetition_penalty=1.1,
        bad_words=[[7], [8, 9]],
    )
    expected = run(make_cycle(target, None), PROMPTS, params)
    assert run(make_cycle(target, LOOKUP), PROMPTS, params) == expected


def test_it_needs_no_page_of_its_own_and_serves_beside_nothing_else(target: Target) -> None:
    """The same pages as plain decoding, but for the block that may stand past the end."""
    plain, lookup = make_cycle(target, None), make_cycle(target, LOOKUP)
    assert lookup._cache.num_pages == plain._cache.num_pages
    assert lookup.block_size == 4
    assert make_cycle(target, toy_drafter(target)).block_size == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"min_match": 3, "max_match": 2}, "must be at least"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PromptLookup(**changes)
