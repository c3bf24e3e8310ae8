"""Bias, bans and penalties, against their formulas, at every row of a round."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dspark.algorithms.draft_vocabulary import DraftVocabulary
from dspark.algorithms.logit_state import LogitState
from dspark.core import SamplingParams
from dspark.errors import InputError

V = 6
BANNED = -math.inf


def new_state(
    prompt: Sequence[int] = (), answer: Sequence[int] = (), eos_ids: Sequence[int] = (5,), **options
) -> LogitState:
    params = SamplingParams(**options)
    state = LogitState(
        request_id="a", params=params, prompt_ids=prompt, eos_ids=eos_ids, vocab_size=V
    )
    state.commit(answer)
    return state


def shaped(
    state: LogitState,
    logits: Sequence[float],
    drafted: Sequence[Sequence[int]] = ((),),
    vocabulary: DraftVocabulary | None = None,
) -> Tensor:
    logits_nV = torch.tensor([logits] * len(drafted), dtype=torch.float32)
    state.shape_(logits_nV, drafted, vocabulary)
    return logits_nV


def test_a_request_without_rules_shapes_nothing():
    state = new_state(prompt=[1, 2], answer=[3], temperature=0.5, top_k=2)
    assert not state.shapes_logits
    assert shaped(state, [1, -1, 0, 2, 3, 4]).tolist() == [[1, -1, 0, 2, 3, 4]]


def test_repetition_penalty_looks_at_prompt_answer_and_drafted_tokens():
    state = new_state(prompt=[0], answer=[1], repetition_penalty=2.0)
    rows = shaped(state, [4, -4, 4, -4, 4, 4], [(), (2,), (2, 3)])
    assert rows.tolist() == [
        [2, -8, 4, -4, 4, 4],
        [2, -8, 2, -4, 4, 4],
        [2, -8, 2, -8, 4, 4],
    ]


def test_presence_and_frequency_look_at_the_answer_only():
    state = new_state(prompt=[0], answer=[1, 1], presence_penalty=0.5, frequency_penalty=0.25)
    rows = shaped(state, [0.0] * V, [(), (1,), (1, 4)])
    assert rows.tolist() == [
        [0, -1.0, 0, 0, 0, 0],
        [0, -1.25, 0, 0, 0, 0],
        [0, -1.25, 0, 0, -0.75, 0],
    ]


def test_committing_equals_drafting():
    """UC-031: a token counts the same before and after it is committed."""
    options = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "bad_words": [[2], [1, 4, 0]],
        "min_tokens": 2,
    }
    logits = [0.3, -1.0, 2.0, 0.5, 1.5, 0.1]
    tokens = [1, 4, 4, 1, 4]
    drafted = shaped(
        new_state([3], **options), logits, [tokens[:j] for j in range(len(tokens) + 1)]
    )
    for j in range(len(tokens) + 1):
        committed = shaped(new_state([3], tokens[:j], **options), logits)
        assert torch.equal(committed[0], drafted[j])


def test_bias_is_added_and_minus_infinity_bans():
    state = new_state(logit_bias={0: 1.5, 3: BANNED})
    assert shaped(state, [1.0] * V).tolist() == [[2.5, 1, 1, BANNED, 1, 1]]


def test_a_banned_token_stays_banned_under_every_penalty():
    state = new_state(
        answer=[2],
        bad_words=[[2]],
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
    )
    assert float(shaped(state, [0.0] * V)[0, 2]) == BANNED


def test_bad_words_are_banned_where_they_would_be_completed():
    """Across the prompt's end, inside the answer and inside the round."""
    state = new_state(prompt=[1], answer=[], bad_words=[[1, 2, 3], [4, 4]])
    rows = shaped(state, [0.0] * V, [(), (2,), (2, 4), (4, 1), (1, 2, 4), (4, 1, 2)])
    banned = [set((row == BANNED).nonzero()[:, 0].tolist()) for row in rows]
    assert banned == [set(), {3}, {4}, set(), {4}, {3}]
    state.commit([4, 1])
    state.commit([2])
    assert shaped(state, [0.0] * V)[0].tolist() == [0, 0, 0, BANNED, 0, 0]


def test_min_tokens_counts_tokens_not_rounds():
    """UC-029: EOS and stop ids are impossible before answer index 3, wherever rounds end."""
    for answer in ([], [0], [0, 0], [0, 0, 0]):
        state = new_state(answer=answer, min_tokens=3, stop_token_ids=[1])
        rows = shaped(state, [0.0] * V, [(), (0,), (0, 0), (0, 0, 0)])
        for j, row in enumerate(rows):
            is_early = len(answer) + j < 3
            assert ((row == BANNED).nonzero()[:, 0].tolist() == [1, 5]) == is_early
            assert bool(row.isfinite().all()) != is_early
    assert not new_state(answer=[0, 0, 0], min_tokens=3).shapes_logits


def test_ids_that_are_no_tokens_in_the_drafted_prefix_are_passed_over():
    """UC-009: rows behind an invalid draft are never used, but they must not fail."""
    state = new_state(prompt=[0], repetition_penalty=2.0, frequency_penalty=1.0, bad_words=[[1, 2]])
    rows = shaped(state, [1.0] * V, [(), (-1,), (V, 3)])
    assert rows[1].tolist() == rows[0].tolist()
    assert float(rows[2, 3]) == -0.5


def test_a_drafter_with_its_own_columns_receives_the_same_rules():
    d2t_S = torch.tensor([4, 1, 5, 0])
    vocabulary = DraftVocabulary.of(d2t_S, vocab_size=V)
    state = new_state(
        prompt=[0],
        answer=[1],
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 3.0, 2: 9.0},
        bad_words=[[0], [1, 4], [3, 2]],
        min_tokens=2,
    )
    logits = torch.tensor([0.5, -0.5, 1.0, 2.0, -2.0, 3.0])
    drafted = [(), (4,), (3,)]
    whole = shaped(state, logits.tolist(), drafted)
    part = shaped(state, logits[d2t_S].tolist(), drafted, vocabulary)
    assert torch.equal(part, whole[:, d2t_S])


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {V: 1.0}}, {"stop_token_ids": [-1]}, {"bad_words": [[0, V]]}],
    ids=["logit_bias", "stop_token_ids", "bad_words"],
)
def test_tokens_outside_the_vocabulary_are_refused_by_name(options: dict):
    """UC-033: a clear sentence instead of an index error in a batch."""
    with pytest.raises(InputError, match=f"{next(iter(options))} names token .*0..5"):
        new_state(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": 0},
        {"min_p": 1.5},
        {"presence_penalty": 3.0},
        {"frequency_penalty": math.nan},
        {"max_tokens": -1},
    ],
)
def test_illegal_values_are_refused_with_the_fields_name(options: dict):
    """UC-033."""
    with pytest.raises(InputError, match=next(iter(options))):
        SamplingParams(**options)


def test_ids_of_the_models_eos_list_beyond_its_logits_are_no_rule():
    state = new_state(eos_ids=[2, 999], min_tokens=1)
    assert shaped(state, [0.0] * V).tolist() == [[0, 0, BANNED, 0, 0, 0]]
