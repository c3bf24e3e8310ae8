"""Constrained answers in the whole engine: always in the language, and as plain decoding says."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dspark.algorithms.late_grammar import LateGrammar
from dspark.core import Coupling, DraftBlock, FinishReason, Request, SamplingParams
from dspark.engine.live_request import LiveRequest
from dspark.engine.prompt_lookup import PromptLookup
from dspark.errors import InputError
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target
from tests.algorithms.toy_distributions import chi_square_p_value
from tests.algorithms.toy_grammar import ToyGrammar, pairs_then_end
from tests.engine.toy_cycles import PROMPTS, make_cycle, packed, rounds_of_one, run
from tests.toys import EOS_ID, VOCAB_SIZE, toy_chain, toy_drafter, toy_target

A, B, C = 7, 9, 20
PAIRS = pairs_then_end(A, B, C, EOS_ID, vocab_size=VOCAB_SIZE)
# wide: any of a third of the tokens after any other; 20 and EOS may end it
THIRD = list(range(0, VOCAB_SIZE, 3))
WIDE = ToyGrammar(
    {
        0: dict.fromkeys(THIRD, 1) | {20: 2},
        1: dict.fromkeys(THIRD, 0) | {EOS_ID: ToyGrammar.END},
        2: {EOS_ID: ToyGrammar.END, 21: 0},
    },
    VOCAB_SIZE,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def options(grammar: Any, **changes: Any) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": 16, "grammar": grammar}
    return SamplingParams(**{**values, **changes})


def is_in_language(grammar: Any, tokens: Sequence[int]) -> bool:
    """Whether the tokens are the beginning of a text, or a whole one."""
    matcher = grammar.matcher()
    return all(not matcher.is_finished and matcher.accept(token) for token in tokens)


def decode_masked_slowly(target: Target, prompt: Sequence[int], params: SamplingParams) -> Any:
    """The slow greedy reference: the whole sequence again, the mask of a replayed grammar."""
    ids, matcher = list(prompt), params.grammar.matcher()  # type: ignore[union-attr]
    while len(ids) < len(prompt) + params.max_tokens and not matcher.is_finished:
        hidden = target.states([torch.tensor(ids)], tap_layers=()).hidden_ND
        logits_V = target.logits(hidden[-1:])[0].float()
        logits_V[~matcher.allowed()] = -torch.inf
        ids.append(int(logits_V.argmax()))
        assert matcher.accept(ids[-1])
    return ids[len(prompt) :]


@pytest.mark.parametrize("grammar", [PAIRS, WIDE], ids=["pairs", "wide"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 5}, {"temperature": 1.3}])
@pytest.mark.parametrize(
    "name", ["modules", "packed", "small vocabulary", "eagle3", "mtp", "lookup"]
)
def test_answers_are_those_of_masked_plain_decoding_whatever_drafts(
    target: Target, name: str, sampling: dict[str, Any], grammar: ToyGrammar
) -> None:
    """UC-041: a small vocabulary may hold no allowed token at all."""
    drafter: Any = {
        "modules": toy_drafter(target),
        "packed": packed(toy_drafter(target)),
        "small vocabulary": packed(toy_drafter(target, d2t_S=torch.arange(8, VOCAB_SIZE, 5))),
        "eagle3": toy_chain(target, DrafterKind.EAGLE3),
        "mtp": toy_chain(target, DrafterKind.MTP),
        "lookup": PromptLookup(block_size=4),
    }[name]
    params = options(grammar, **sampling)
    found = run(make_cycle(target, drafter), PROMPTS, params)
    assert all(is_in_language(grammar, answer) for answer in found)
    if params.is_greedy or params.seed is not None:
        assert found == run(make_cycle(target, None), PROMPTS, params)
    if params.is_greedy:
        assert found == [decode_masked_slowly(target, prompt, params) for prompt in PROMPTS]


def test_the_distribution_of_constrained_answers_is_the_targets_masked_one() -> None:
    """The whole engine, maximal coupling, a drafter that cannot propose what some states ask for:
    3 tokens of 3,000 answers against the exact masked joint. A false alarm: 1e-4."""
    moves = {0: {1: 1, 2: 2, 3: 0}, 1: {0: 2, 3: 1, 5: 0}, 2: {3: 0, 5: 2}}
    grammar = ToyGrammar(moves, 6)
    target = toy_target(vocab_size=6, pad_token_id=0, eos_token_id=None, scale=3.0)
    drafter = toy_drafter(target, vocab_size=6, mask_token_id=5, d2t_S=torch.tensor([0, 1, 2, 4]))
    cycle = make_cycle(target, drafter, max_requests=64, num_positions=1024, is_checked=False)
    params = options(grammar, temperature=1.0, max_tokens=4, coupling=Coupling.MAXIMAL)
    answers = run(cycle, [[1, 2]] * 3000, params)
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in joint.items():
            matcher = grammar.matcher()
            assert all(matcher.accept(token) for token in prefix)
            hidden = target.states([torch.tensor([1, 2, *prefix])], tap_layers=()).hidden_ND
            logits_V = target.logits(hidden[-1:])[0].double()
            logits_V[~matcher.allowed()] = -torch.inf
            for token, chance in enumerate(logits_V.softmax(-1).tolist()):
                if chance > 0.0:
                    longer[*prefix, token] = mass * chance
        joint = longer
    counts = dict.fromkeys(joint, 0)
    for answer in answers:
        counts[tuple(answer[:3])] += 1
    observed = torch.tensor(list(counts.values()), dtype=torch.float64)
    expected = 3000 * torch.tensor(list(joint.values()), dtype=torch.float64)
    assert len(expected) > 15
    assert chi_square_p_value(observed, expected) > 1e-4


class RandomDraft:
    """Proposes any ids, some of them none at all."""

    def __init__(self, block: Sequence[Sequence[int]] | None = None) -> None:
        self.block_size, self.tap_layers, self.vocabulary = 4, (), None
        self.generator = torch.Generator().manual_seed(0)
        self.block = block
        self.num_calls = 0

    def feed(self, states: object) -> None:
        pass

    def look(self, _requests: Sequence[LiveRequest]) -> dict[int, list[float]]:
        return {}

    def catch_up(self, requests: Sequence[LiveRequest], **_: object) -> None:
        pass

    def propose(self, requests: Sequence[LiveRequest], **kwargs: Any) -> DraftBlock:
        shape = (len(requests), self.block_size)
        tokens_RK = torch.randint(-1, VOCAB_SIZE + 2, shape, generator=self.generator)
        if self.block is not None:
            tokens_RK = torch.tensor(self.block * len(requests))
        self.num_calls += 1
        return DraftBlock(tokens_RK=tokens_RK, probs_RKS=None, confidence_RK=None, is_certain=True)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 2}, {"temperature": 1.0}])
def test_random_drafts_leave_the_answer_in_the_language(
    target: Target, sampling: dict[str, Any]
) -> None:
    for grammar in (PAIRS, WIDE):
        params = options(grammar, max_tokens=24, **sampling)
        cycle = make_cycle(target, toy_drafter(target, block_size=4))
        cycle._proposer = RandomDraft()  # type: ignore[assignment]
        found = run(cycle, PROMPTS, params)
        assert all(is_in_language(grammar, answer) for answer in found)
        if sampling != {"temperature": 1.0}:
            assert found == run(make_cycle(target, None), PROMPTS, params)


def test_forbidden_drafts_are_not_verified(target: Target) -> None:
    cycle = make_cycle(target, toy_drafter(target, block_size=4))
    cycle._proposer = RandomDraft([[A, B, 30, A]])  # type: ignore[assignment]
    rounds = rounds_of_one(cycle, PROMPTS[0], options(PAIRS, temperature=1.0, seed=1))
    drafted = [item for item in rounds if item.num_offered]
    assert drafted
    assert {item.num_planned for item in drafted} <= {0, 2}


def test_an_answer_ends_where_its_grammar_ends(target: Target) -> None:
    """UC-043: with EOS ignored too, and with drafts that go on behind the end."""
    wants_end = {C: 1e3, EOS_ID: 1e3}
    for ignore_eos in (False, True):
        params = options(PAIRS, logit_bias=wants_end, ignore_eos=ignore_eos)
        cycle = make_cycle(target, toy_drafter(target, block_size=4))
        cycle._proposer = RandomDraft([[EOS_ID, A, B, C]])  # type: ignore[assignment]
        rounds = rounds_of_one(cycle, PROMPTS[0], params)
        assert [t for item in rounds for t in item.token_ids] == [C, EOS_ID]
        assert rounds[-1].finish_reason is FinishReason.STOP
        assert rounds[-1].num_planned == 1


def test_a_grammar_may_begin_in_the_middle_of_a_block(target: Target) -> None:
    """UC-042: text as by plain decoding, for every place of the marker in a block."""
    marker = 30
    late = LateGrammar(grammar=PAIRS, marker=[marker], end_ids=[EOS_ID])
    params = options(late, temperature=1.0, seed=8, max_tokens=20, logit_bias={marker: 5.0})
    expected = run(make_cycle(target, None), PROMPTS, params)
    assert any(marker in answer for answer in expected)
    for answer in expected:
        if marker in answer:
            assert is_in_language(PAIRS, answer[answer.index(marker) + 1 :])
    assert run(make_cycle(target, toy_drafter(target)), PROMPTS, params) == expected
    for at in range(4):
        cycle = make_cycle(target, toy_drafter(target, block_size=4))
        block = [[marker if j == at else 5 if j < at else A for j in range(4)]]
        cycle._proposer = RandomDraft(block)  # type: ignore[assignment]
        assert run(cycle, PROMPTS, params) == expected


def test_a_constrained_request_that_gave_way_goes_on_where_it_was(target: Target) -> None:
    """UC-044: no draft and no state of the grammar is left from before."""
    params = options(WIDE, temperature=1.0, seed=4, max_tokens=24, logit_bias={EOS_ID: -9.0})
    expected = run(make_cycle(target, None), PROMPTS, params)
    cycle = make_cycle(target, toy_drafter(target), num_positions=76)
    assert run(cycle, PROMPTS, params) == expected
    assert cycle.load.total_sent_back > 0


def test_constrained_and_free_requests_share_steps(target: Target) -> None:
    each = [
        options(PAIRS),
        SamplingParams(temperature=0.0, max_tokens=16),
        options(WIDE, temperature=0.8, seed=3),
        SamplingParams(temperature=1.0, max_tokens=16, seed=3),
    ]
    found = run(make_cycle(target, packed(toy_drafter(target))), PROMPTS, each)
    for index, params in enumerate(each):
        assert found[index] == run(make_cycle(target, None), [PROMPTS[index]], params)[0]


def test_a_request_without_a_possible_token_is_named_and_the_others_go_on(target: Target) -> None:
    """A failed step has committed nothing: it is taken again without the request at fault."""
    cycle = make_cycle(target, toy_drafter(target))
    good = options(WIDE, temperature=1.0, seed=3)
    bad = options(PAIRS, bad_words=[[B]], logit_bias={A: 99.0})
    cycle.submit(Request(id="good", prompt_ids=PROMPTS[0], params=good))
    cycle.submit(Request(id="bad", prompt_ids=PROMPTS[1], params=bad))
    tokens = list(cycle.step().rounds[0].token_ids)
    with pytest.raises(InputError, match="'bad' bans every token at answer index 1") as failure:
        cycle.step()
    assert failure.value.request_id == "bad"
    with pytest.raises(InputError, match="'bad'"):
        cycle.step()
    assert cycle.abort("bad")
    cycle.check()
    while cycle.has_work:
        tokens += [t for item in cycle.step().rounds for t in item.token_ids]
    assert tokens == run(make_cycle(target, None), [PROMPTS[0]], good)[0]
