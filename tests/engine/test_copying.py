"""Copies of the request's own text beside a drafter: the same answers, and what is kept of them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from dspark.algorithms.copy_odds import CopyOdds
from dspark.algorithms.policies import Adaptive
from dspark.core import Coupling, DraftBlock, Origin, Request, RoundResult, SamplingParams
from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.engine.block_rows import merged
from dspark.engine.copying import CopyingPass
from dspark.engine.cycle import Cycle
from dspark.engine.planner import Outcome, Outlook
from dspark.models.drafter_config import DrafterKind
from dspark.models.target import Target
from tests.algorithms.toy_costs import BLOCK, linear_cost
from tests.engine.test_chain_pass import chi_square_of_pairs
from tests.engine.test_cycle import PROMPTS, make_cycle, run
from tests.engine.toy_cycles import packed
from tests.toys import toy_chain, toy_drafter, toy_target


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def drafter_of(target: Target, kind: str) -> Any:
    if kind == "eagle3":
        return toy_chain(target, DrafterKind.EAGLE3)
    drafter = toy_drafter(target)
    return packed(drafter) if kind == "packed" else drafter


def all_rounds(cycle: Cycle) -> list[RoundResult]:
    rounds = []
    while cycle.has_work:
        rounds.extend(cycle.step().rounds)
    return rounds


@pytest.mark.parametrize("kind", ["packed", "modules", "eagle3"])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 4, "logit_bias": {7: 12.0, 8: 12.0}},
        {"temperature": 0.0, "repetition_penalty": 1.1, "bad_words": [[7], [8, 9]]},
        {"temperature": 0.0, "num_logprobs": 2},
    ],
)
def test_the_text_is_the_targets_own(target: Target, kind: str, options: dict[str, Any]) -> None:
    """Copied and drafted rows in one batch; prompts that repeat themselves make copies certain."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)
    prompts = [*PROMPTS, [5, 6, 7, 8, 5, 6, 7], [3, 4, 5, 3, 4, 5, 3, 4, 5]]
    expected = run(make_cycle(target, None, max_requests=3), prompts, params)
    cycle = make_cycle(target, drafter_of(target, kind), copies=True, max_requests=3)
    for index, prompt in enumerate(prompts):
        cycle.submit(Request(id=str(index), prompt_ids=prompt, params=params))
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    found = set()
    while cycle.has_work:
        for item in cycle.step().rounds:
            answers[item.request_id].extend(item.token_ids)
            found |= {item.is_copied} if item.num_offered else set()
    assert list(answers.values()) == expected
    assert found == {True, False}


def test_a_loop_is_copied_in_whole_blocks_and_says_so(target: Target) -> None:
    """Also after tokens of the drafter; the drafter itself would know nothing of token 7."""
    params = SamplingParams(temperature=0.0, max_tokens=42, ignore_eos=True, logit_bias={7: 1e4})
    cycle = make_cycle(target, toy_drafter(target), copies=True)
    cycle.submit(Request(id="0", prompt_ids=[5, 6], params=params))
    rounds = all_rounds(cycle)
    assert [token for item in rounds for token in item.token_ids] == [7] * 42
    copied = [item for item in rounds if item.is_copied]
    assert all(item.num_accepted == 4 for item in copied[:-1])
    assert copied[0].origins == [*[Origin.COPIED] * 4, Origin.BONUS]
    assert len(copied) >= 7
    assert not any(Origin.COPIED in item.origins for item in rounds if not item.is_copied)


def test_copies_are_left_where_they_were_wrong_until_they_would_be_right(target: Target) -> None:
    """What texts say of copies that nobody proposed counts as well."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, logit_bias={7: 1e4})
    cycle = make_cycle(target, toy_drafter(target), copies=True, max_requests=1)
    proposer = cycle._proposer
    assert isinstance(proposer, CopyingPass)
    for length in (3, 4, 6, 9, 16):
        for _ in range(40):
            proposer._odds[True].saw(length, 0)
    cycle.submit(Request(id="0", prompt_ids=[5, 6], params=params))
    whether = [item.is_copied for item in all_rounds(cycle) if item.num_offered]
    first = whether.index(True)
    assert first > 10
    assert all(whether[first:])


def test_the_drafter_has_its_context_behind_copies(target: Target) -> None:
    """What it drafts after copied rounds is what a fresh drafter drafts of the same text."""
    drafter = drafter_of(target, "packed")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = [5, 6, 7, 8, 5, 6, 7]

    def drawn(copies: bool) -> dict[int, tuple[int, ...]]:
        cycle = make_cycle(target, drafter, copies=copies, max_requests=1)
        cycle.submit(Request(id="0", prompt_ids=prompt, params=params))
        blocks, num_tokens, has_copied = {}, 0, False
        for item in all_rounds(cycle):
            if item.num_offered and not item.is_copied and (has_copied or not copies):
                blocks[num_tokens] = tuple(item.offered_ids)
            has_copied |= item.is_copied
            num_tokens += len(item.token_ids)
        return blocks

    behind, fresh = drawn(copies=True), drawn(copies=False)
    both = behind.keys() & fresh.keys()
    assert both
    assert {at: behind[at] for at in both} == {at: fresh[at] for at in both}


@pytest.mark.parametrize("num_columns", [None, 4])
def test_maximal_coupling_keeps_the_distribution(
    num_columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a one-hot q beside drawn ones; words without a column are not copied. 1e-4."""
    # these copies are seldom right, and would soon be left: a coin chooses
    rng = random.Random(0)
    monkeypatch.setattr(CopyOdds, "expected", lambda *_: 9.0 * rng.randrange(2))
    target = toy_target(vocab_size=6, pad_token_id=0, eos_token_id=None, scale=3.0)
    changes = {} if num_columns is None else {"d2t_S": torch.arange(num_columns)}
    drafter = toy_drafter(target, vocab_size=6, mask_token_id=5, block_size=3, **changes)
    cycle = make_cycle(
        target, drafter, copies=True, max_requests=64, num_positions=64 * 40, is_checked=False
    )
    params = SamplingParams(temperature=1.0, max_tokens=3, coupling=Coupling.MAXIMAL)
    # whatever the first token is, it stood behind the same words before
    prompt = [token for x in range(6) for token in (1, 2, x, 5 - x)] + [1, 2]
    for number in range(3000):
        cycle.submit(Request(id=str(number), prompt_ids=prompt, params=params))
    answers: dict[str, list[int]] = {}
    counts = {True: 0, False: 0}
    for item in all_rounds(cycle):
        answers.setdefault(item.request_id, []).extend(item.token_ids)
        counts[item.is_copied] += item.num_planned > 0
    assert min(counts.values()) > 500
    assert chi_square_of_pairs(target, prompt, list(answers.values())) > 1e-4


def test_rows_of_copies_find_their_places_in_a_merged_block() -> None:
    def block(token: int, is_copied: list[bool] | None) -> DraftBlock:
        tokens_RK = torch.full((2, 3), token)
        return DraftBlock(
            tokens_RK=tokens_RK,
            probs_RKS=None,
            confidence_RK=tokens_RK.float(),
            is_copied=is_copied,
        )

    found = merged(((0, 3), block(7, None)), ((4, 1), block(8, [True, True])), num_rows=5)
    assert found.is_copied == [False, True, False, False, True]
    assert found.tokens_RK[:, 0].tolist() == [7, 8, 0, 7, 8]
    assert merged(((0, 3), block(7, None)), num_rows=5).is_copied is None


@pytest.mark.parametrize("num_requests", [2, 20])
def test_a_planner_believes_copies_as_they_are_and_learns_nothing_of_its_drafter(
    num_requests: int,
) -> None:
    """Neither its calibration nor what drafting costs: the drafter had no part in them."""
    planner = AdaptivePlanner(Adaptive(), block_size=BLOCK, cost=linear_cost())
    for slot in range(num_requests):
        planner.begin(slot, SamplingParams(temperature=0.0), 0)
    outlook = Outlook(
        slots=list(range(num_requests)),
        rounds=[0] * num_requests,
        max_widths=[BLOCK] * num_requests,
        num_prompt_tokens=0,
        num_certain=num_requests,
        context=num_requests,
    )
    told: list[int] = []
    learnt: list[list[int]] = []
    planner.costs.observe = lambda **step: told.append(step["num_drafting"])  # type: ignore
    planner.calibration.observe = (  # type: ignore[method-assign]
        lambda rounds, _: learnt.append(list(rounds.rows))
    )
    sure, doubtful = [9.0] * BLOCK, [-9.0] * BLOCK
    logits_RK = np.array([sure, *[doubtful] * (num_requests - 1)], dtype=np.float32)
    planner.calibration._scale_CK[:] = 0.0  # its drafter's confidences mean nothing
    for terms in planner.calibration._terms.values():
        terms[:] = [(0.0, -9.0)] * BLOCK
    caps = planner.caps(outlook)
    assert all(caps)  # the first blocks are drawn for all
    lengths = planner.plan(logits_RK, caps, [0]).lengths
    assert lengths[0] == BLOCK
    planner.observe(
        Outcome(
            verified=lengths,
            accepted=[BLOCK] + [0] * (num_requests - 1),
            num_prompt_tokens=0,
            draft_seconds=1e-3,
            verify_seconds=2e-3,
        )
    )
    planner._take_in()
    assert learnt == [list(range(1, num_requests))]
    assert told in ([], [num_requests - 1])
