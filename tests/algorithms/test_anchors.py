import math

import pytest
import torch

from dspark.algorithms import anchors


def mask(length: int, first: int, last: int) -> torch.Tensor:
    positions = torch.arange(length)
    return (positions >= first) & (positions <= last)


def test_a_slot_is_supervised_by_the_mask_of_the_token_it_predicts():
    """UC-106: answer at 8..39, block 4, anchor 37."""
    valid_RK = anchors.supervision(mask(45, 8, 39), torch.tensor([37]), block_size=4)
    assert valid_RK.tolist() == [[True, True, False, False]]


def test_labels_beyond_the_end_are_not_supervised():
    valid_RK = anchors.supervision(mask(40, 8, 39), torch.tensor([37, 38]), block_size=4)
    assert valid_RK.tolist() == [[True, True, False, False], [True, False, False, False]]


def test_supervision_stops_at_the_first_hole():
    loss_mask_T = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    valid_RK = anchors.supervision(loss_mask_T, torch.tensor([1]), block_size=4)
    assert valid_RK.tolist() == [[True, False, False, False]]


def test_the_last_prompt_token_is_no_anchor():
    """UC-106: the first answer token comes from the target's prefill, never from a block."""
    assert anchors.candidates(mask(12, 8, 10)).tolist() == [8, 9]


@pytest.mark.parametrize(("num_valid", "expected"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)])
def test_short_answers_have_one_candidate_less_than_tokens(num_valid: int, expected: int):
    """UC-113: 0, 1, 2, block - 1 and block supervised tokens."""
    loss_mask_T = mask(20, 10, 9 + num_valid)
    candidates_C = anchors.candidates(loss_mask_T)
    assert len(candidates_C) == expected
    assert anchors.num_anchors(expected, tokens_per_anchor=1.0) == expected
    chosen = anchors.choose(candidates_C, count=expected, generator=torch.Generator())
    blocks = anchors.blocks(torch.arange(20), loss_mask_T, chosen, block_size=4)
    assert blocks.valid_RK.sum(dim=1).tolist() == list(range(expected, 0, -1))


def test_an_answer_with_a_candidate_gets_at_least_one_anchor():
    assert anchors.num_anchors(1, tokens_per_anchor=100.0) == 1
    assert anchors.num_anchors(700, tokens_per_anchor=1.0, limit=512) == 512
    assert anchors.num_anchors(0, tokens_per_anchor=3.5) == 0


def test_chosen_anchors_are_distinct_and_ascending():
    candidates_C = torch.arange(50) * 2
    chosen = anchors.choose(candidates_C, count=20, generator=torch.Generator().manual_seed(3))
    assert len(set(chosen.tolist())) == 20
    assert chosen.tolist() == sorted(chosen.tolist())
    assert set(chosen.tolist()) <= set(candidates_C.tolist())


def test_every_candidate_is_equally_likely():
    """UC-113: 512 of 700 candidates, 2000 draws; chi-square within 5 standard deviations."""
    generator = torch.Generator().manual_seed(0)
    candidates_C = torch.arange(700)
    counts = torch.zeros(700)
    for _ in range(2000):
        counts[anchors.choose(candidates_C, count=512, generator=generator)] += 1
    share = 512 / 700
    variance = 2000 * share * (1 - share) * 700 / 699
    chi_square = float(((counts - 2000 * share).square() / variance).sum())
    assert abs(chi_square - 699) < 5 * math.sqrt(2 * 699)


def test_a_slot_stands_at_its_position_and_is_taught_the_next_token():
    """UC-105: slot j sits at a + j, is fed the token there and predicts the one after."""
    ids_T = torch.arange(100, 112)
    blocks = anchors.blocks(ids_T, mask(12, 2, 11), torch.tensor([3, 9]), block_size=3)
    assert blocks.positions_RK.tolist() == [[3, 4, 5], [9, 10, 11]]
    assert blocks.previous_RK[0].tolist() == [103, 104, 105]
    assert blocks.labels_RK[0].tolist() == [104, 105, 106]
    assert blocks.valid_RK.tolist() == [[True, True, True], [True, True, False]]
