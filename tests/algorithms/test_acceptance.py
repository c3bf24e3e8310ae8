"""The acceptance rule: its numbers, its edges, and whole rounds over toy models."""

import math
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.algorithms.acceptance import (
    accept,
    accept_matching,
    accept_maximal,
    accept_probability,
    acceptance_rate,
    draw_draft,
    one_hot,
    residual,
    shared_noise_bound,
)
from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.logit_state import LogitState
from dspark.algorithms.noise import RoundNoise, Stream
from dspark.algorithms.sampling import (
    RowContext,
    RowOperators,
    draw_categorical,
    process_logits,
)
from dspark.core import Coupling, Origin, SamplingParams
from dspark.errors import InputError
from dspark.kernels import selection
from tests.algorithms.toy_decoding import ToyRequest, decode
from tests.algorithms.toy_distributions import chi_square_p_value, toy_logits

V = 10


def toy_model(salt: int, vocab_size: int = V):
    def model(prefix: Sequence[int]) -> Tensor:
        return toy_logits(prefix, vocab_size=vocab_size, salt=salt)

    return model


def constant_model(token: int):
    def model(prefix: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(token), V).float() * 40

    return model


def round_noise(count: int, *, seed: int = 0, position: int = 3) -> RoundNoise:
    return RoundNoise(
        seed_R=torch.arange(count) + seed,
        position_R=torch.full((count,), position),
        round_R=torch.zeros(count, dtype=torch.int64),
    )


def one_slot(p_V: Tensor, q_V: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Emitted tokens and acceptance of `count` rounds of one drafted token."""
    noise = round_noise(count)
    q_RV = q_V.expand(count, -1)
    operators = selection.operators()  # the engine's own: the same tokens, sooner
    draft_R = operators.draw_categorical(q_RV, noise.uniforms(Stream.DRAFT, slots=range(1))[:, 0])
    verdict = accept_maximal(
        probs_NV=p_V.expand(2 * count, -1),
        draft_tokens_RK=draft_R[:, None],
        draft_probs_RKS=q_RV[:, None],
        lengths=[1] * count,
        accept_uniforms_RK=noise.uniforms(Stream.ACCEPT, slots=range(1)),
        next_uniforms_R=noise.uniforms(Stream.TARGET, slots=range(1))[:, 0],
        operators=operators,
    )
    accepted_R = torch.tensor(verdict.num_accepted)
    return torch.where(accepted_R == 1, draft_R, torch.tensor(verdict.next_tokens)), accepted_R


def test_the_textbook_pair_of_distributions():
    """UC-003: accept rate 0.70, marginal p, residual (1, 0, 0)."""
    p_V, q_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    torch.testing.assert_close(residual(p_V[None], q_V[None])[0], torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(
        accept_probability(p_V, q_V), torch.tensor([1.0, 0.6, 2 / 3], dtype=torch.float64)
    )
    assert float(acceptance_rate(p_V[None], q_V[None])) == pytest.approx(0.7)
    count = 200_000
    emitted_R, accepted_R = one_slot(p_V, q_V, count=count)
    assert float(accepted_R.double().mean()) == pytest.approx(0.70, abs=0.005)
    assert chi_square_p_value(torch.bincount(emitted_R, minlength=3), p_V * count) > 1e-3


@pytest.mark.parametrize("coupling", Coupling)
def test_the_drafter_follows_the_requests_temperature(coupling: Coupling):
    """UC-002: near-equal logits at T = 1; output chi-square AND the acceptance that is due."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5])
    drafter_logits = torch.tensor([2.2, 1.3, 1.1, 0.2])
    requests = [
        ToyRequest(params=SamplingParams(coupling=coupling), width=1, seed=seed)
        for seed in range(5_000)
    ]
    answers = decode(
        requests,
        target=lambda prefix: logits,
        drafter=lambda prefix: drafter_logits,
        num_tokens=1,
        block_size=1,
    )
    counts = torch.bincount(torch.tensor(answers)[:, 0], minlength=4)
    p_1V, q_1V = logits.softmax(-1)[None], drafter_logits.softmax(-1)[None]
    assert chi_square_p_value(counts, p_1V[0] * len(requests)) > 1e-3
    due = acceptance_rate(p_1V, q_1V)
    if coupling is Coupling.SHARED_NOISE:
        due = shared_noise_bound(due)
    accepted = sum(request.rounds[0][1] for request in requests) / len(requests)
    assert accepted >= float(due) - 0.02


def test_the_distribution_drawn_from_is_the_tensor_of_the_ratio():
    """UC-004: bf16 near ties; the returned float32 q explains the draws within chi-square."""
    count = 50_000
    logits_1V = torch.tensor([[4.0, 4.0 + 2**-5, 3.96875, 1.0]]).bfloat16()
    state = new_state("a", SamplingParams(temperature=0.9, coupling=Coupling.MAXIMAL), 4)
    scores = process_logits(logits_1V.expand(count, 4), [RowContext(state=state)] * count)
    draft = draw_draft(scores, noise=round_noise(count), slot=0)
    assert draft.probs_RS is not None
    assert draft.probs_RS.dtype == torch.float32
    counts = torch.bincount(draft.tokens_R, minlength=4)
    assert chi_square_p_value(counts, draft.probs_RS[0] * count) > 1e-3


def new_state(request_id: str, params: SamplingParams, vocab_size: int = V) -> LogitState:
    return LogitState(
        request_id=request_id,
        params=params,
        prompt_ids=[0],
        eos_ids=[],
        vocab_size=vocab_size,
    )


def maximal_case(draft: list[int], *, length: int, uniforms: list[float], vocab_size: int = V):
    """A request of `length` verified tokens under fixed p and q; returns the keyword arguments."""
    generator = torch.Generator().manual_seed(1)
    num_slots = len(draft)
    return {
        "probs_NV": torch.randn(length + 1, vocab_size, generator=generator).softmax(-1),
        "draft_tokens_RK": torch.tensor([draft]),
        "draft_probs_RKS": torch.randn(1, num_slots, vocab_size, generator=generator).softmax(-1),
        "lengths": [length],
        "accept_uniforms_RK": torch.tensor([uniforms], dtype=torch.float64),
        "next_uniforms_R": torch.tensor([0.5], dtype=torch.float64),
    }


def test_inputs_are_not_changed_and_a_second_call_agrees():
    """UC-006: the target's distribution is bit-identical after a rejection."""
    arguments = maximal_case([3, 4, 5], length=3, uniforms=[0.0, 0.999999, 0.5])
    copies = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    first, second = accept_maximal(**arguments), accept_maximal(**arguments)
    assert first == second
    assert first.num_accepted[0] < 3
    for name, copy in copies.items():
        assert torch.equal(arguments[name], copy), name
    p_RV, q_RV = torch.rand(2, 5), torch.rand(2, 5)
    before = p_RV.clone(), q_RV.clone()
    residual(p_RV, q_RV)
    assert torch.equal(p_RV, before[0])
    assert torch.equal(q_RV, before[1])


@pytest.mark.parametrize("bad", [-1, V, -(2**40), 2**40])
def test_an_id_that_is_no_token_is_rejected_and_the_target_speaks(bad: int):
    """UC-009: never indexed, never emitted; the token in its place is drawn from p itself."""
    arguments = maximal_case([5, bad, 7], length=3, uniforms=[0.0, 0.0, 0.0])
    verdict = accept_maximal(**arguments)
    assert verdict.num_accepted == [1]
    expected = draw_categorical(arguments["probs_NV"][1:2], arguments["next_uniforms_R"])
    assert verdict.next_tokens == expected.tolist()
    target_tokens_N = torch.tensor([5, 2, 7, 1])
    verdict = accept_matching(
        target_tokens_N=target_tokens_N, draft_tokens_RK=torch.tensor([[5, bad, 7]]), lengths=[3]
    )
    assert (verdict.num_accepted, verdict.next_tokens) == ([1], [2])
    assert verdict.origin(0) is Origin.CORRECTED


def test_a_token_outside_the_draft_vocabulary_is_rejected():
    """q is zero there, so the drafter cannot have drawn it."""
    vocabulary = DraftVocabulary.of(torch.tensor([8, 1, 2]), vocab_size=V)
    arguments = maximal_case([5], length=1, uniforms=[0.0])
    arguments["draft_probs_RKS"] = torch.full((1, 1, 3), 1 / 3)
    verdict = accept_maximal(**arguments, vocabulary=vocabulary)
    assert verdict.num_accepted == [0]
    expected = draw_categorical(arguments["probs_NV"][:1], arguments["next_uniforms_R"])
    assert verdict.next_tokens == expected.tolist()


def test_a_residual_without_mass_falls_back_to_p():
    """UC-010: p = q up to one unit in the last place, u just under 1, filtered support."""
    p_V = torch.tensor([0.25, 0.35, 0.4, 0.0, 0.0])
    q_V = torch.nextafter(p_V, torch.tensor(2.0)) * (p_V > 0)
    for p, q in ((p_V, q_V), (q_V, p_V), (p_V, p_V)):
        torch.testing.assert_close(residual(p[None], q[None])[0], p)
    largest = 1 - 2.0**-33
    verdicts = [
        accept_maximal(
            probs_NV=p_V.expand(2, -1),
            draft_tokens_RK=torch.tensor([[2]]),
            draft_probs_RKS=q_V[None, None],
            lengths=[1],
            accept_uniforms_RK=torch.tensor([[1 - 2.0**-53]], dtype=torch.float64),
            next_uniforms_R=torch.tensor([u], dtype=torch.float64),
        )
        for u in (2.0**-33, 0.3, largest)
    ]
    assert [verdict.num_accepted for verdict in verdicts] == [[0], [0], [0]]
    assert [verdict.next_tokens for verdict in verdicts] == [[0], [1], [2]]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40), st.booleans())
def test_accepting_and_correcting_add_up_to_p(seed: int, vocab_size: int, has_zeros: bool):
    """Property: q a + (1 - rate) residual = p, and rate = 1 - TV, for any p and q."""
    generator = torch.Generator().manual_seed(seed)
    p_V, q_V = (4 * torch.randn(2, vocab_size, generator=generator)).softmax(-1)
    if has_zeros:
        p_V[seed % vocab_size] = 0.0
        q_V[(seed + 1) % vocab_size] = 0.0
        p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    accepted_V = q_V.double() * accept_probability(p_V, q_V)
    rate = float(acceptance_rate(p_V[None], q_V[None]))
    assert float(accepted_V.sum()) == pytest.approx(rate, abs=1e-6)
    assert rate == pytest.approx(1 - float((p_V - q_V).abs().sum()) / 2, abs=1e-6)
    emitted_V = accepted_V + (1 - accepted_V.sum()) * residual(p_V[None], q_V[None])[0]
    torch.testing.assert_close(emitted_V.float(), p_V, atol=1e-6, rtol=0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_the_sampler_decides_as_the_pure_functions_say(seed: int, lengths: list[int]):
    """Ragged batch against one request and one slot at a time, in Python."""
    generator = torch.Generator().manual_seed(seed)
    count, num_slots, size = len(lengths), 4, 5
    vocabulary = DraftVocabulary.of(torch.tensor([3, 0, 4]), vocab_size=size)
    p_NV = torch.randn(sum(lengths) + count, size, generator=generator).softmax(-1)
    q_RKS = torch.randn(count, num_slots, 3, generator=generator).softmax(-1)
    draft_RK = torch.randint(-1, size + 1, (count, num_slots), generator=generator)
    accept_u_RK = torch.rand(count, num_slots, generator=generator, dtype=torch.float64)
    next_u_R = torch.rand(count, generator=generator, dtype=torch.float64)
    verdict = accept_maximal(
        probs_NV=p_NV,
        draft_tokens_RK=draft_RK,
        draft_probs_RKS=q_RKS,
        lengths=lengths,
        accept_uniforms_RK=accept_u_RK,
        next_uniforms_R=next_u_R,
        vocabulary=vocabulary,
    )
    start = 0
    for r, length in enumerate(lengths):
        weights_V, accepted = None, 0
        for slot in range(length):
            token, p_V = int(draft_RK[r, slot]), p_NV[start + slot]
            column = vocabulary.d2t_S.tolist().index(token) if token in (3, 0, 4) else None
            if column is None:
                weights_V = p_V
                break
            if accept_u_RK[r, slot] >= accept_probability(p_V[token], q_RKS[r, slot, column]):
                weights_V = residual(p_V[None], q_RKS[r, slot][None], vocabulary)[0]
                break
            accepted += 1
        if weights_V is None:
            weights_V = p_NV[start + length]
        assert verdict.num_accepted[r] == accepted
        expected = draw_categorical(weights_V[None], next_u_R[r : r + 1])
        assert verdict.next_tokens[r] == int(expected)
        start += length + 1


def test_matching_stops_at_the_first_difference():
    verdict = accept_matching(
        target_tokens_N=torch.tensor([1, 2, 3, 4, 9, 5, 6, 7, 8, 8]),
        draft_tokens_RK=torch.tensor([[1, 2, 3], [9, 0, 0], [5, 0, 7], [8, 9, 9]]),
        lengths=[3, 0, 2, 1],
    )
    assert verdict.num_accepted == [3, 0, 1, 1]
    assert verdict.next_tokens == [4, 9, 6, 8]
    origins = [verdict.origin(r) for r in range(4)]
    assert origins == [Origin.BONUS, Origin.PLAIN, Origin.CORRECTED, Origin.BONUS]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupling", Coupling)
def test_any_block_size_and_batch_size_runs(coupling: Coupling, temperature: float, filters: dict):
    """UC-019: {greedy, sample} x {no filter, top_k, top_p} x block {0..8} x batch {1, 3}."""
    params = SamplingParams(temperature=temperature, coupling=coupling, **filters)
    for block_size in (0, 1, 2, 3, 8):
        for count in (1, 3):
            requests = [ToyRequest(params=params, width=8, seed=r) for r in range(count)]
            answers = decode(
                requests,
                target=toy_model(1),
                drafter=toy_model(2),
                num_tokens=9,
                block_size=block_size,
            )
            assert [len(answer) for answer in answers] == [9] * count
            assert all(0 <= token < V for answer in answers for token in answer)


PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.6},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"bad_words": [[1], [2, 3]], "logit_bias": {4: 2.0}, "min_tokens": 7},
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_does_not_depend_on_width_batch_or_drafter(temperature: float, options: dict):
    """UC-031, UC-037, method section 4: greedy and shared noise, text a function of the seed."""
    params = SamplingParams(temperature=temperature, coupling=Coupling.SHARED_NOISE, **options)
    seeds, num_tokens = [3, 4, 2**62], 14

    def run(seeds: list[int], width: int, drafter) -> list[list[int]]:
        requests = [ToyRequest(params=params, prompt=(2, 5), width=width, seed=s) for s in seeds]
        return decode(
            requests, target=toy_model(1), drafter=drafter, num_tokens=num_tokens, eos_ids=(9,)
        )

    plain = run(seeds, 0, toy_model(2))
    for drafter in (toy_model(1), toy_model(2), constant_model(7)):
        for width in (1, 3, 7):
            assert run(seeds, width, drafter) == plain
    assert [run([seed], 4, toy_model(2))[0] for seed in seeds] == plain
    if temperature > 0:
        assert plain[0] != plain[1]


def test_seeded_greedy_and_unseeded_requests_share_a_batch():
    """UC-007, UC-037: each row of a mixed batch equals its solo run."""
    params = [
        SamplingParams(temperature=0.1, seed=1),
        SamplingParams(temperature=0.1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, coupling=Coupling.MAXIMAL, top_k=4),
        SamplingParams(temperature=1e-6, seed=2),
        SamplingParams(seed=2, repetition_penalty=1.5),
    ]
    widths = [3, 2, 0, 4, 1, 5]

    def requests(indices: Sequence[int]) -> list[ToyRequest]:
        return [ToyRequest(params=params[i], width=widths[i], seed=10 + i) for i in indices]

    models = {"target": toy_model(1), "drafter": toy_model(2)}
    batch = requests(range(6))
    together = decode(batch, num_tokens=20, **models)
    for i in range(6):
        (alone,) = decode(requests([i]), num_tokens=20, **models)
        assert together[i] == alone
        assert all(accepted >= 0 for _, accepted in batch[i].rounds)
    assert together[2] == together[4]
    tokens = [0]
    for token in together[2]:
        assert token == int(toy_model(1)(tokens).argmax())
        tokens.append(token)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_wrong_first_draft_is_never_committed(block_size: int):
    """UC-011: the drafter always proposes a wrong token: plain greedy text, nothing accepted."""

    def cycle(prefix: Sequence[int]) -> Tensor:
        return constant_model((prefix[-1] + 1) % 9)(prefix)

    request = ToyRequest(params=SamplingParams(temperature=0.0), width=block_size)
    (answer,) = decode(
        [request],
        target=cycle,
        drafter=constant_model(9),
        num_tokens=20,
        block_size=block_size,
    )
    assert answer == [(i + 1) % 9 for i in range(20)]
    assert request.rounds == [(block_size, 0)] * 20
    assert set(request.origins) == {Origin.CORRECTED}


@pytest.mark.parametrize("coupling", Coupling)
def test_every_transition_is_possible_under_the_committed_prefix(coupling: Coupling):
    """UC-012: a cycle with p = 0.9, the drafter wrong at every third token."""

    def target(prefix: Sequence[int]) -> Tensor:
        logits_V = torch.full((V,), -math.inf)
        logits_V[(prefix[-1] + 1) % V] = math.log(0.9)
        logits_V[(prefix[-1] + 2) % V] = math.log(0.1)
        return logits_V

    def drafter(prefix: Sequence[int]) -> Tensor:
        is_wrong = len(prefix) % 3 == 0
        return constant_model((prefix[-1] + (5 if is_wrong else 1)) % V)(prefix)

    requests = [
        ToyRequest(params=SamplingParams(coupling=coupling), width=4, seed=seed)
        for seed in range(20)
    ]
    answers = decode(requests, target=target, drafter=drafter, num_tokens=30)
    for answer in answers:
        for before, after in pairwise([0, *answer]):
            assert (after - before) % V in (1, 2)
    steps = [(b - a) % V for answer in answers for a, b in pairwise(answer)]
    assert steps.count(2) / len(steps) == pytest.approx(0.1, abs=0.04)
    assert any(accepted for request in requests for _, accepted in request.rounds)


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_sits_at_the_same_place_wherever_it_falls_in_a_block(index: int):
    """UC-021, the rule's part: commits are the plain text in order, so that the first EOS among
    them is the plain text's own, at every index of a block and as its last token."""
    params = SamplingParams(temperature=0.0)
    plain = ToyRequest(params=params, width=0)
    decode([plain], target=toy_model(5), drafter=toy_model(5), num_tokens=8, block_size=0)
    eos = plain.answer[index]
    drafted = ToyRequest(params=params, width=7)
    decode([drafted], target=toy_model(5), drafter=toy_model(5), num_tokens=8, block_size=7)
    assert drafted.rounds == [(7, 7)]
    assert drafted.origins == [*[Origin.ACCEPTED] * 7, Origin.BONUS]
    assert drafted.answer.index(eos) == plain.answer.index(eos)


@pytest.mark.parametrize("width", [0, 1, 4, 8])
@pytest.mark.parametrize("eos_by_drafter", [True, False])
def test_min_tokens_counts_tokens_at_any_width(width: int, eos_by_drafter: bool):
    """UC-029: the target's argmax is EOS from the start: six other tokens, then EOS."""
    request = ToyRequest(params=SamplingParams(temperature=0.0, min_tokens=6), width=width)

    def target(prefix: Sequence[int]) -> Tensor:
        return toy_model(1)(prefix) + 20 * torch.eye(V)[9]

    (answer,) = decode(
        [request],
        target=target,
        drafter=constant_model(9) if eos_by_drafter else toy_model(1),
        num_tokens=8,
        eos_ids=(9,),
    )
    assert 9 not in answer[:6]
    assert answer[6] == 9


def test_no_token_outside_the_targets_top_three_is_emitted():
    """UC-034: T = 2, top_k = 3, both couplings, rows deep in a round."""
    for coupling in Coupling:
        params = SamplingParams(temperature=2.0, top_k=3, coupling=coupling)
        requests = [ToyRequest(params=params, width=5, seed=seed) for seed in range(30)]
        answers = decode(requests, target=toy_model(1), drafter=toy_model(2), num_tokens=12)
        for answer in answers:
            prefix = [0]
            for token in answer:
                assert token in toy_model(1)(prefix).topk(3).indices.tolist()
                prefix.append(token)


@pytest.mark.parametrize("coupling", Coupling)
def test_a_draft_vocabulary_changes_no_distribution(coupling: Coupling):
    """Tokens the drafter cannot propose still come, as often as the target wants."""
    vocabulary = DraftVocabulary.of(torch.tensor([7, 2, 4]), vocab_size=V)
    logits_V = toy_logits((), vocab_size=V, salt=3)
    requests = [
        ToyRequest(params=SamplingParams(coupling=coupling), width=1, seed=seed)
        for seed in range(4_000)
    ]
    answers = decode(
        requests,
        target=lambda prefix: logits_V,
        drafter=lambda prefix: logits_V[vocabulary.d2t_S],
        num_tokens=2,
        block_size=1,
        vocabulary=vocabulary,
    )
    for place in range(2):
        counts = torch.bincount(torch.tensor(answers)[:, place], minlength=V)
        assert chi_square_p_value(counts, logits_V.softmax(-1) * len(requests)) > 1e-3
    assert any(accepted for request in requests for _, accepted in request.rounds)


@pytest.mark.parametrize("coupling", Coupling)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_bans_every_token_is_refused_only_when_it_gets_there(
    coupling: Coupling, temperature: float
):
    """After `0 1` nothing may follow; a draft of `0 1` alone is no reason to fail."""
    words = [[0, 1, token] for token in range(V)]
    params = SamplingParams(temperature=temperature, coupling=coupling, bad_words=words)

    def request() -> ToyRequest:
        return ToyRequest(params=params, prompt=(5,), width=4, seed=1)

    def drafter(prefix: Sequence[int]) -> Tensor:
        return constant_model(1 if prefix[-1] == 0 else 0)(prefix)

    (answer,) = decode([request()], target=constant_model(2), drafter=drafter, num_tokens=4)
    assert answer == [2, 2, 2, 2]
    with pytest.raises(InputError, match=r"'0' bans every token at answer index 2"):
        decode([request()], target=drafter, drafter=drafter, num_tokens=4)


def test_maximal_coupling_draws_each_round_anew():
    """A draft that was dropped must not come back because its position does: a plan that saw it
    would have seen the future."""
    noise = round_noise(1)
    later = RoundNoise(seed_R=noise.seed_R, position_R=noise.position_R, round_R=noise.round_R + 1)
    for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.TARGET):
        first, second = (
            noise.uniforms(stream, slots=range(3)),
            later.uniforms(stream, slots=range(3)),
        )
        assert not bool((first == second).any())


def test_accept_without_draft_distributions_serves_greedy_and_shared_noise():
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=5)]
    rows = [RowContext(state=new_state(str(i), item)) for i, item in enumerate(params)]
    logits_NV = torch.stack([toy_logits((i,), vocab_size=V, salt=1) for i in range(2)])
    scores = process_logits(logits_NV, rows)
    draft = draw_draft(scores, noise=round_noise(2), slot=0)
    assert draft.probs_RS is None
    verdict = accept(
        scores=process_logits(logits_NV[[0, 0, 1, 1]], [rows[0], rows[0], rows[1], rows[1]]),
        draft_tokens_RK=draft.tokens_R[:, None],
        draft_probs_RKS=None,
        lengths=[1, 1],
        noise=round_noise(2),
    )
    assert verdict.num_accepted == [1, 1]


def test_a_maximal_request_without_drafts_joins_a_round_that_drafted():
    """A prompt ends in the step in which another request's drafts are verified."""
    params = [SamplingParams(seed=5), SamplingParams(coupling=Coupling.MAXIMAL)]
    rows = [RowContext(state=new_state(str(i), item)) for i, item in enumerate(params)]
    logits_NV = torch.stack([toy_logits((i,), vocab_size=V, salt=1) for i in (0, 0, 1)])
    verdict = accept(
        scores=process_logits(logits_NV, [rows[0], rows[0], rows[1]]),
        draft_tokens_RK=torch.zeros((2, 3), dtype=torch.int64),
        draft_probs_RKS=None,
        lengths=[1, 0],
        noise=round_noise(2),
        vocabulary=DraftVocabulary.of(torch.tensor([1, 2]), vocab_size=V),
    )
    probs_1V = logits_NV[2:].softmax(-1)
    uniform_R = round_noise(2).uniforms(Stream.TARGET, slots=range(1))[1]
    assert verdict.next_tokens[1] == int(draw_categorical(probs_1V, uniform_R))
    assert verdict.origin(1) is Origin.PLAIN


def test_faster_twins_of_the_operators_give_the_same_rounds():
    """The engine hands in the kernels; drafter columns stand for target ids in both."""
    vocabulary = DraftVocabulary.of(torch.tensor([7, 2, 4, 0]), vocab_size=V)
    state = new_state("a", SamplingParams(seed=3, temperature=0.8, top_k=6))
    count, noise = 50, round_noise(50)
    draft_logits = torch.stack([toy_logits((i,), vocab_size=4, salt=2) for i in range(count)])
    target_logits = torch.stack([toy_logits((i,), vocab_size=V, salt=1) for i in range(2 * count)])
    rows = [RowContext(state=state)] * (2 * count)
    results = []
    for operators in (RowOperators(), selection.operators()):
        scores = process_logits(
            draft_logits, rows[:count], vocabulary=vocabulary, operators=operators
        )
        draft = draw_draft(scores, noise=noise, slot=0, vocabulary=vocabulary)
        verdict = accept(
            scores=process_logits(target_logits, rows, operators=operators),
            draft_tokens_RK=draft.tokens_R[:, None],
            draft_probs_RKS=None,
            lengths=[1] * count,
            noise=noise,
            vocabulary=vocabulary,
        )
        results.append((draft.tokens_R.tolist(), verdict))
    assert results[0] == results[1]
    assert set(results[0][0]) <= {7, 2, 4, 0}


@pytest.mark.parametrize("bad", [None, -1, V])
def test_chosen_tokens_are_judged_by_their_own_probability(bad: int | None):
    """A proposal that nobody drew: accepted with p(x), otherwise drawn from p without x."""
    tokens_RK = torch.tensor([[4, 7, 4], [7, 2, 9 if bad is None else bad]])
    probs_RKS, vocabulary = one_hot(tokens_RK, vocab_size=V)
    wide_RKV = torch.zeros(2, 3, V)
    wide_RKV[:, :, vocabulary.d2t_S] = probs_RKS
    for (r, k), token in zip(product(range(2), range(3)), tokens_RK.flatten(), strict=True):
        expected_V = torch.zeros(V)
        if 0 <= int(token) < V:
            expected_V[int(token)] = 1.0
        assert torch.equal(wide_RKV[r, k], expected_V)
    p_V = toy_logits((), vocab_size=V, salt=3).softmax(-1)
    q_VS, columns = one_hot(torch.arange(V)[:, None], vocab_size=V)
    taken_V = accept_probability(p_V, torch.ones(V))
    for token in range(V):
        rest_V = residual(p_V[None], q_VS[token], columns)[0].double()
        emitted_V = (1 - taken_V[token]) * rest_V
        emitted_V[token] += taken_V[token]
        torch.testing.assert_close(emitted_V.float(), p_V, atol=1e-6, rtol=0)


def test_certain_drafts_of_maximal_requests_keep_the_distribution():
    """Chi-square over 20,000 rounds of two copied tokens; a false alarm has probability 1e-4."""
    count, size = 20_000, 5
    p_V = toy_logits((1,), vocab_size=size, salt=1).softmax(-1)
    state = LogitState(
        request_id="a",
        params=SamplingParams(coupling=Coupling.MAXIMAL),
        prompt_ids=(0,),
        eos_ids=(),
        vocab_size=size,
    )
    rows = [RowContext(state=state)] * (2 * count)
    tokens_RK = torch.full((count, 1), int(p_V.argmax()))
    probs_RKS, vocabulary = one_hot(tokens_RK, vocab_size=size)
    verdict = accept(
        scores=process_logits(p_V.log().expand(2 * count, -1), rows),
        draft_tokens_RK=tokens_RK,
        draft_probs_RKS=probs_RKS,
        lengths=[1] * count,
        noise=round_noise(count),
        vocabulary=vocabulary,
    )
    accepted_R = torch.tensor(verdict.num_accepted) == 1
    first_R = torch.where(accepted_R, int(p_V.argmax()), torch.tensor(verdict.next_tokens))
    assert chi_square_p_value(torch.bincount(first_R, minlength=size), p_V * count) > 1e-4
    assert float(accepted_R.double().mean()) == pytest.approx(float(p_V.max()), abs=0.02)
