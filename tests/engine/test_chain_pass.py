"""Chain drafters in the cycle: the target's own text, and drafts that a dense chain repeats."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.algorithms.confidence import log_odds_of_best
from dspark.core import Coupling, Request, SamplingParams
from dspark.engine.chain_pass import ChainPass
from dspark.models.chain import ChainDrafter
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target
from tests.engine.test_cycle import PROMPTS, decode_slowly, make_cycle, rounds_of, run
from tests.toys import VOCAB_SIZE, toy_chain, toy_target

KINDS = pytest.mark.parametrize("kind", [DrafterKind.EAGLE3, DrafterKind.MTP])


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def dense_chain(
    drafter: ChainDrafter, target: Target, tokens: list[int], forced: Sequence[int] | None = None
) -> list[Tensor]:
    """Draft logits after `tokens`, the last being the anchor: no cache, loops only.

    The chain goes on with its own most likely tokens, or with the `forced` ones.
    """
    config = drafter.config
    taps = target.states([torch.tensor(tokens)], tap_layers=config.target_layer_ids).taps_NM
    states = list(drafter.state(taps[: len(tokens) - 1]))
    ids = list(tokens)
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(_layer: int, q_NHE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        keys.append(k_NGE[0])
        values.append(v_NGE[0])
        low = 0 if config.windows[0] is None else max(0, len(keys) - config.windows[0])
        out = torch.empty_like(q_NHE)
        for head in range(q_NHE.shape[1]):
            group = head // (q_NHE.shape[1] // k_NGE.shape[1])
            k = torch.stack(keys)[low:, group]
            v = torch.stack(values)[low:, group]
            out[0, head] = (k @ q_NHE[0, head] / q_NHE.shape[2] ** 0.5).softmax(0) @ v
        return out

    found = []
    for position in range(len(tokens) - 2 + config.block_size):
        advanced = drafter.advance(
            states[position][None],
            torch.tensor([ids[position + 1]]),
            torch.tensor([position]),
            attend,
        )
        if position >= len(tokens) - 2:
            logits = drafter.base_logits(drafter.hidden(advanced))[0]
            found.append(logits)
            column = int(logits.argmax())
            own = column if drafter.d2t_S is None else int(drafter.d2t_S[column])
            ids.append(own if forced is None else forced[len(found) - 1])
            states.append(advanced[0])
    return found


@KINDS
@pytest.mark.parametrize("changes", [{}, {"layer_windows": (3,)}, {"has_head_norms": False}])
def test_drafts_after_rounds_of_rejection_equal_those_of_a_dense_chain(
    target: Target, kind: DrafterKind, changes: dict[str, Any]
) -> None:
    """UC-051, UC-105: pages, catching up and overwriting leave no trace in the drafts."""
    drafter = toy_chain(target, kind, **changes)
    cycle = make_cycle(target, drafter)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    off = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, max_draft=0)
    cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
    cycle.submit(Request(id="1", prompt_ids=PROMPTS[1], params=off))
    proposer = cycle._proposer
    assert isinstance(proposer, ChainPass)
    for number in range(9):
        cycle.step()
        if number < 2:
            continue
        with torch.inference_mode():
            lives = cycle._live if number == 8 else cycle._live[:1]
            block = proposer.propose(lives, cache=cycle._cache, rounds=rounds_of(cycle, lives))
            for live, row, odds in zip(lives, block.tokens_RK, block.confidence_RK, strict=True):
                logits = dense_chain(drafter, target, live.tokens)
                assert row.tolist() == [int(x.argmax()) for x in logits]
                expected = log_odds_of_best(torch.stack(logits))
                torch.testing.assert_close(odds, expected, atol=1e-3, rtol=1e-3)


@KINDS
@pytest.mark.parametrize("max_step_tokens", [512, 9])
@pytest.mark.parametrize("width", [0, 1, None])
def test_greedy_text_is_the_targets(
    target: Target, kind: DrafterKind, width: int | None, max_step_tokens: int
) -> None:
    """UC-013, UC-092."""
    cycle = make_cycle(
        target, toy_chain(target, kind), width=width, max_step_tokens=max_step_tokens
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert run(cycle, PROMPTS, params) == [decode_slowly(target, p, 24) for p in PROMPTS]


@KINDS
def test_seeded_text_does_not_depend_on_the_chain(target: Target, kind: DrafterKind) -> None:
    """Shared noise at temperature 1: any chain, any block, any draft vocabulary."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    expected = [run(make_cycle(target, None), [prompt], params)[0] for prompt in PROMPTS]
    for changes in (
        {},
        {"seed": 9, "block_size": 7},
        {"block_size": 1},
        {"d2t_S": torch.arange(0, VOCAB_SIZE, 3)},
    ):
        drafter = toy_chain(target, kind, **changes)
        assert run(make_cycle(target, drafter), PROMPTS, params) == expected


@KINDS
def test_options_act_inside_a_block(target: Target, kind: DrafterKind) -> None:
    """UC-031: the drafted prefix counts for penalties and banned words."""
    params = SamplingParams(
        temperature=1.0, seed=3, top_k=4, repetition_penalty=1.2, bad_words=[[8, 9]], max_tokens=24
    )
    expected = run(make_cycle(target, None), PROMPTS, params)
    assert run(make_cycle(target, toy_chain(target, kind)), PROMPTS, params) == expected


@KINDS
def test_a_slot_of_the_cache_used_again_starts_from_its_own_text(
    target: Target, kind: DrafterKind
) -> None:
    """UC-050: nothing of an earlier request is taken for a new one's context."""
    drafter = toy_chain(target, kind)
    used = make_cycle(target, drafter, max_requests=1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    run(used, [PROMPTS[1]], params)
    for cycle in (used, make_cycle(target, drafter, max_requests=1)):
        cycle.submit(Request(id="0", prompt_ids=PROMPTS[0], params=params))
        cycle.step()
        with torch.inference_mode():
            (live,) = cycle._live
            proposer = cycle._proposer
            assert proposer is not None
            block = proposer.propose([live], cache=cycle._cache, rounds=rounds_of(cycle, [live]))
        logits = dense_chain(drafter, target, live.tokens)
        assert block.tokens_RK[0].tolist() == [int(x.argmax()) for x in logits]
        cycle.abort("0")


@KINDS
def test_the_distribution_of_two_tokens_is_the_targets(kind: DrafterKind) -> None:
    """Maximal coupling through the whole engine, chi-square; a false alarm has probability 1e-4.

    The exact statement is enumerated in tests/algorithms/test_exactness.py.
    """
    target = toy_target(vocab_size=6, pad_token_id=0, eos_token_id=None, scale=3.0)
    drafter = toy_chain(target, kind, block_size=2)
    cycle = make_cycle(target, drafter, max_requests=64, num_positions=64 * 16, is_checked=False)
    params = SamplingParams(temperature=1.0, max_tokens=3, coupling=Coupling.MAXIMAL)
    answers = run(cycle, [[1, 2]] * 3000, params)
    assert chi_square_of_pairs(target, [1, 2], answers) > 1e-4


def chi_square_of_pairs(target: Target, prompt: list[int], answers: list[list[int]]) -> float:
    """P-value of the answers' first two tokens under the target's distribution."""
    size, length = target.spec.vocab_size, len(prompt)
    sequences = [torch.tensor([*prompt, token]) for token in range(size)]
    hidden = target.states(sequences, tap_layers=()).hidden_ND.view(size, length + 1, -1)
    first = target.logits(hidden[0, length - 1 : length]).double().softmax(-1)[0]
    second = target.logits(hidden[:, length]).double().softmax(-1)
    expected = (first[:, None] * second).flatten() * len(answers)
    observed = torch.zeros(size * size, dtype=torch.float64)
    for answer in answers:
        observed[answer[0] * size + answer[1]] += 1
    is_rare = expected < 5
    if bool(is_rare.any()):
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
        observed = torch.cat([observed[~is_rare], observed[is_rare].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
