"""The output distribution over 3-token blocks, computed exactly, equals the target's.

Toy tables give p and q for every prefix, after the request's processing. For each number of
verified tokens the distribution of the first three emitted tokens follows by enumeration from
the very functions the sampler calls: no sampling, so a bias of 1e-6 shows. The checker itself is
tested on wrong rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from dspark.algorithms.acceptance import (
    accept_matching,
    accept_maximal,
    accept_probability,
    acceptance_rate,
    one_hot,
    residual,
    shared_noise_bound,
)
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.noise import RoundNoise, Stream
from dspark.algorithms.sampling import RowContext, draw_shared, process_logits
from dspark.core import Coupling, SamplingParams
from dspark.kernels import selection
from tests.algorithms.toy_distributions import chi_square_p_value, shared_noise_joint, toy_logits
from tests.algorithms.toy_grammar import ToyGrammar

V = 4
BLOCK = 3
PROMPT, ANSWER = (0, 1), (2,)
EOS = (3,)
PREFIXES = [prefix for length in range(BLOCK + 1) for prefix in product(range(V), repeat=length)]
ROW_OF = {prefix: row for row, prefix in enumerate(PREFIXES)}
DRAFT_VOCABULARY = DraftVocabulary.of(torch.tensor([2, 0]), vocab_size=V)

# behind the answer's first 2: some states allow only what the small vocabulary cannot draft
GRAMMAR = ToyGrammar(
    {0: {2: 1}, 1: {0: 2, 1: 3, 2: 1}, 2: {1: 3, 3: 4}, 3: {0: 1, 1: 2, 3: 4}, 4: {0: 4, 1: 2}}, V
)
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "greedy": {"temperature": 0.0},
    "tiny temperature": {"temperature": 1e-6},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "all filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
    "repetition": {"repetition_penalty": 1.6},
    "repetition below 1": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.8},
    "negative frequency": {"frequency_penalty": -0.9},
    "bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "banned token": {"logit_bias": {2: float("-inf")}},
    "bad words": {"bad_words": [[3], [2, 0], [0, 0, 1], [1, 2, 0]]},
    "min tokens": {"min_tokens": 3},
    "min tokens and stop ids": {"min_tokens": 2, "stop_token_ids": [1]},
    "grammar": {"grammar": GRAMMAR},
    "grammar, penalty and filter": {
        "grammar": GRAMMAR,
        "presence_penalty": 0.7,
        "top_p": 0.8,
        "temperature": 1.2,
    },
    "everything": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {0: 0.5},
        "bad_words": [[1, 1]],
        "min_tokens": 3,
    },
}


@dataclass(frozen=True)
class Step:
    """One slot: `accepted[x]` P(emit x as drafted, go on), `stopped[y]` P(emit y, round over)."""

    accepted: Tensor
    stopped: Tensor


Rule = Callable[[Tensor, Tensor], Step]  # (p_V, q_S) -> Step


def new_state(options: dict, answer: Sequence[int]) -> LogitState:
    state = LogitState(
        request_id="toy",
        params=SamplingParams(**options),
        prompt_ids=PROMPT,
        eos_ids=EOS,
        vocab_size=V,
    )
    state.commit(list(answer))
    return state


def plain_table(options: dict) -> Tensor:
    """Target distributions [prefix, V] as plain decoding sees them: the prefix is committed."""
    rows = [RowContext(state=new_state(options, (*ANSWER, *prefix))) for prefix in PREFIXES]
    return process_logits(toy_table(1), rows).probs()


def verify_table(options: dict) -> Tensor:
    """The same distributions as a round sees them: the prefix is drafted."""
    state = new_state(options, ANSWER)
    rows = [RowContext(state=state, drafted=prefix) for prefix in PREFIXES]
    return process_logits(toy_table(1), rows).probs()


def is_reachable(prefix: Sequence[int], probs_PV: Tensor) -> bool:
    return all(probs_PV[ROW_OF[tuple(prefix[:j])], token] > 0 for j, token in enumerate(prefix))


def draft_table(options: dict, vocabulary: DraftVocabulary | None) -> Tensor:
    """The drafter's distributions [prefix, S], the request's options applied to them too."""
    state = new_state(options, ANSWER)
    rows = [RowContext(state=state, drafted=prefix) for prefix in PREFIXES]
    logits = toy_table(2) if vocabulary is None else toy_table(2)[:, vocabulary.d2t_S]
    return process_logits(logits, rows, vocabulary=vocabulary).probs()


def toy_table(salt: int) -> Tensor:
    return torch.stack([toy_logits(prefix, vocab_size=V, salt=salt) for prefix in PREFIXES])


def widened(q_S: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    if vocabulary is None:
        return q_S
    q_V = torch.zeros(V)
    q_V[vocabulary.d2t_S] = q_S
    return q_V


def maximal_rule(
    vocabulary: DraftVocabulary | None = None,
    accept_probability: Callable[[Tensor, Tensor], Tensor] = accept_probability,
    residual: Callable[..., Tensor] = residual,
) -> Rule:
    def rule(p_V: Tensor, q_S: Tensor) -> Step:
        q_V = widened(q_S, vocabulary)
        taken_V = accept_probability(p_V, q_V).double()
        accepted_V = q_V.double() * taken_V
        rejected = (q_V.double() * (1 - taken_V)).sum()
        rest_V = residual(p_V[None], q_S[None], vocabulary)[0].double()
        return Step(accepted=accepted_V, stopped=rejected * rest_V)

    return rule


def shared_rule(vocabulary: DraftVocabulary | None = None) -> Rule:
    def rule(p_V: Tensor, q_S: Tensor) -> Step:
        joint_VV = shared_noise_joint(p_V, widened(q_S, vocabulary))
        accepted_V = joint_VV.diagonal().clone()
        return Step(accepted=accepted_V, stopped=joint_VV.sum(0) - accepted_V)

    return rule


def emitted(p_PV: Tensor, q_PS: Tensor, plain_PV: Tensor, rule: Rule, length: int) -> Tensor:
    """Distribution [V, V, V] of the next three tokens if `length` drafted ones are verified.

    After the round the text goes on by plain decoding, so that only this round can be wrong.
    """
    output = torch.zeros((V,) * BLOCK, dtype=torch.float64)

    def finish(prefix: tuple[int, ...], mass: Tensor) -> None:
        for rest in product(range(V), repeat=BLOCK - len(prefix)):
            whole = prefix + rest
            probability = mass.clone()
            for depth in range(len(prefix), BLOCK):
                probability *= plain_PV[ROW_OF[whole[:depth]], whole[depth]]
            output[whole] += probability

    def walk(prefix: tuple[int, ...], mass: Tensor) -> None:
        row = ROW_OF[prefix]
        if len(prefix) == length:
            for token in range(V):
                if len(prefix) < BLOCK:
                    finish((*prefix, token), mass * p_PV[row, token].double())
            if len(prefix) == BLOCK:
                output[prefix] += mass
            return
        step = rule(p_PV[row], q_PS[row])
        for token in range(V):
            finish((*prefix, token), mass * step.stopped[token])
            walk((*prefix, token), mass * step.accepted[token])

    walk((), torch.tensor(1.0, dtype=torch.float64))
    return output


def plain_joint(plain_PV: Tensor) -> Tensor:
    output = torch.ones((V,) * BLOCK, dtype=torch.float64)
    for whole in product(range(V), repeat=BLOCK):
        for depth in range(BLOCK):
            output[whole] *= plain_PV[ROW_OF[whole[:depth]], whole[depth]]
    return output


def largest_error(options: dict, rule: Rule, length: int, vocabulary=None) -> float:
    plain_PV = plain_table(options)
    output = emitted(
        verify_table(options), draft_table(options, vocabulary), plain_PV, rule, length
    )
    return float((output - plain_joint(plain_PV)).abs().max())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_rows_inside_a_round_equal_those_of_plain_decoding(options: dict):
    """UC-031, UC-034, UC-029: penalties, filters and min_tokens hold on every verify row."""
    plain_PV, rows = plain_table(options), range(len(PREFIXES))
    if "grammar" in options:  # nothing is asked behind a token that it forbids
        rows = [row for row in rows if is_reachable(PREFIXES[row], plain_PV)]
    assert torch.equal(verify_table(options)[rows], plain_PV[rows])


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_each_option_changes_the_toy_distributions(name: str):
    """Otherwise the exactness of that option would be an empty statement."""
    change = (plain_table(OPTIONS[name]) - plain_table({})).abs().max()
    assert float(change) > 0.05


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("vocabulary", [None, DRAFT_VOCABULARY], ids=["full", "draft vocabulary"])
def test_output_over_three_tokens_equals_the_target_exactly(options: dict, vocabulary):
    """UC-003: both couplings, ragged widths 0..3, every sampling option."""
    for rule in (maximal_rule(vocabulary), shared_rule(vocabulary)):
        for length in range(BLOCK + 1):
            assert largest_error(options, rule, length, vocabulary) < 1e-6, length


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_chosen_tokens_leave_the_output_as_it_is(options: dict):
    """Prompt lookup: one token of each prefix, not drawn and blind to the request's options."""
    chosen_P = toy_table(5).argmax(-1)
    q_PS, vocabulary = one_hot(chosen_P[None], vocab_size=V)
    plain_PV = plain_table(options)
    for rule in (maximal_rule(vocabulary), shared_rule(vocabulary)):
        for length in range(BLOCK + 1):
            output = emitted(verify_table(options), q_PS[0], plain_PV, rule, length)
            assert float((output - plain_joint(plain_PV)).abs().max()) < 1e-6, length


@pytest.mark.parametrize(
    "wrong",
    [
        maximal_rule(accept_probability=lambda p, q: torch.ones_like(p)),
        maximal_rule(accept_probability=lambda p, q: p / p.max()),
        maximal_rule(accept_probability=lambda p, q: (p >= p.max()).double()),
        maximal_rule(residual=lambda p, q, vocabulary: p),
        lambda p, q: Step(accepted=q.double(), stopped=torch.zeros(V)),
    ],
    ids=["accept always", "ratio to the maximum", "argmax only", "no residual", "shared, always"],
)
def test_checker_finds_wrong_rules(wrong: Rule):
    """UC-003; the mutation 'accept with probability 1' must not pass."""
    assert largest_error({}, wrong, 0) < 1e-6
    for length in (1, 2, 3):
        assert largest_error({}, wrong, length) > 1e-3


@pytest.mark.parametrize(
    "ignored", ["repetition", "presence", "frequency", "bad words", "min tokens"]
)
def test_checker_finds_options_that_forget_the_drafted_prefix(ignored: str):
    """UC-031, UC-029: rows processed as if all stood at the round's first position."""
    options = OPTIONS[ignored]
    state = new_state(options, ANSWER)
    rows = [RowContext(state=state) for _ in PREFIXES]
    p_PV = process_logits(toy_table(1), rows).probs()
    plain_PV = plain_table(options)
    output = emitted(p_PV, draft_table(options, None), plain_PV, maximal_rule(), BLOCK)
    assert float((output - plain_joint(plain_PV)).abs().max()) > 1e-3


def test_shared_noise_joint_has_the_right_marginals():
    for salt in range(20):
        p_V = toy_logits((), vocab_size=5, salt=salt).softmax(-1).double()
        q_V = toy_logits((), vocab_size=5, salt=100 + salt).softmax(-1).double()
        if salt % 3 == 0:
            p_V[salt % 5], q_V[(salt + 1) % 5] = 0.0, 0.0
            p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
        joint_VV = shared_noise_joint(p_V, q_V)
        torch.testing.assert_close(joint_VV.sum(0), p_V)
        torch.testing.assert_close(joint_VV.sum(1), q_V)
        rate = acceptance_rate(p_V[None], q_V[None])
        assert (
            float(shared_noise_bound(rate)) - 1e-12
            <= float(joint_VV.trace())
            <= float(rate) + 1e-12
        )


def test_shared_draws_follow_the_exact_joint():
    """200,000 pairs (draft, target) over V = 3; q over a draft vocabulary in another order."""
    count = 200_000
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    order = torch.tensor([2, 0, 1])
    seed_R, position_R = torch.arange(count), torch.full((count,), 9)
    target_R = draw_shared(p_V.log().expand(count, 3), seed_R, position_R)
    draft_R = draw_shared(q_V[order].log().expand(count, 3), seed_R, position_R, order)
    counts = torch.bincount(3 * draft_R + target_R, minlength=9)
    expected = shared_noise_joint(p_V, q_V).flatten() * count
    assert chi_square_p_value(counts, expected) > 1e-3


OPERATORS = selection.operators()  # the engine's own: the same tokens as the reference, sooner


def simulate(coupling: Coupling, *, count: int, accepts_always: bool = False) -> Tensor:
    """Counts of the first three tokens of `count` requests that run rounds of widths 0..3."""
    p_PV, q_PV = toy_table(1).softmax(-1), toy_table(2).softmax(-1)
    depth_P = torch.tensor([len(prefix) for prefix in PREFIXES])
    # A prefix of three tokens absorbs whatever follows.
    child_PV = torch.tensor(
        [
            [ROW_OF.get((*prefix, token), row) for token in range(V)]
            for prefix, row in ROW_OF.items()
        ]
    )
    lengths = [r % (BLOCK + 1) for r in range(count)]
    prefix_R = torch.zeros(count, dtype=torch.int64)
    for round_index in range(BLOCK):
        noise = RoundNoise(
            seed_R=torch.arange(count) + 7,
            position_R=5 + depth_P[prefix_R],
            round_R=torch.full((count,), round_index),
        )
        tokens_K, rows_J = [], [prefix_R]
        for slot in range(BLOCK):
            if coupling is Coupling.MAXIMAL:
                uniform_R = noise.uniforms(Stream.DRAFT, slots=range(slot, slot + 1))[:, 0]
                tokens_K.append(OPERATORS.draw_categorical(q_PV[rows_J[-1]], uniform_R))
            else:
                position_R = noise.position_R + slot
                tokens_K.append(draw_shared(q_PV[rows_J[-1]].log(), noise.seed_R, position_R))
            rows_J.append(child_PV[rows_J[-1], tokens_K[-1]])
        draft_RK, row_RJ = torch.stack(tokens_K, 1), torch.stack(rows_J, 1)
        is_row_RJ = torch.arange(BLOCK + 1) <= torch.tensor(lengths)[:, None]
        p_NV = p_PV[row_RJ[is_row_RJ]]
        if coupling is Coupling.MAXIMAL:
            uniforms_RK = noise.uniforms(Stream.ACCEPT, slots=range(BLOCK))
            verdict = accept_maximal(
                probs_NV=p_NV,
                draft_tokens_RK=draft_RK,
                draft_probs_RKS=q_PV[row_RJ[:, :BLOCK]],
                lengths=lengths,
                accept_uniforms_RK=uniforms_RK * (0.0 if accepts_always else 1.0),
                next_uniforms_R=noise.uniforms(Stream.TARGET, slots=range(1))[:, 0],
                operators=OPERATORS,
            )
        else:
            request_N, slot_N = is_row_RJ.nonzero(as_tuple=True)
            picked = noise.pick(request_N.tolist())
            target_N = draw_shared(p_NV.log(), picked.seed_R, picked.position_R + slot_N)
            verdict = accept_matching(
                target_tokens_N=target_N, draft_tokens_RK=draft_RK, lengths=lengths
            )
        accepted_R1 = torch.tensor(verdict.num_accepted)[:, None]
        last_R = row_RJ.gather(1, accepted_R1)[:, 0]
        prefix_R = child_PV[last_R, torch.tensor(verdict.next_tokens)]
    return torch.bincount(prefix_R, minlength=len(PREFIXES))[-(V**BLOCK) :]


@pytest.mark.parametrize("coupling", Coupling)
def test_two_hundred_thousand_answers_follow_the_target(coupling: Coupling):
    """UC-003, UC-011: whole rounds, ragged widths, this package's own noise; joint of 3 tokens."""
    count = 200_000
    counts = simulate(coupling, count=count)
    assert int(counts.sum()) == count
    expected = plain_joint(toy_table(1).softmax(-1)).flatten() * count
    assert chi_square_p_value(counts, expected) > 1e-3


def test_accepting_always_fails_the_test_with_a_tenth_of_the_answers():
    counts = simulate(Coupling.MAXIMAL, count=20_000, accepts_always=True)
    expected = plain_joint(toy_table(1).softmax(-1)).flatten() * 20_000
    assert chi_square_p_value(counts, expected) < 1e-9
