from pathlib import Path

import torch

from dspark.data.cache_fill import fill_cache
from dspark.data.hidden_states import OnlineStates
from dspark.data.token_mass import select_vocabulary, token_mass
from tests.data.toy_answers import random_answers
from tests.data.toy_caches import toy_format
from tests.toys import VOCAB_SIZE, toy_target


def test_the_mass_is_the_summed_distribution_of_the_supervised_positions(tmp_path: Path):
    target, answers = toy_target(), random_answers(6, vocab_size=VOCAB_SIZE)
    cache = fill_cache(target, answers, tmp_path, format=toy_format())
    expected_V = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for answer in answers:
        (exact,) = OnlineStates(target, tap_layers=()).read([answer])
        rows_ND = exact.last_ND[len(answer.prompt_token_ids) :]
        expected_V += target.logits(rows_ND).double().softmax(dim=1).sum(dim=0)
    torch.testing.assert_close(cache.mass(), expected_V, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(token_mass(target, answers), expected_V, atol=1e-4, rtol=1e-4)


def test_the_draft_vocabulary_takes_the_heaviest_tokens_and_those_always_wanted():
    mass_V = torch.tensor([0.0, 5.0, 1.0, 1.0, 9.0], dtype=torch.float64)
    assert select_vocabulary(mass_V, size=2).tolist() == [1, 4]
    assert select_vocabulary(mass_V, size=3).tolist() == [1, 2, 4]
    assert select_vocabulary(mass_V, size=3, always=[0]).tolist() == [0, 1, 4]


def test_a_corpus_of_few_tokens_still_fills_the_vocabulary():
    """UC-077: 5 distinct ids, 20 rows: 20 different valid ids, the same each time."""
    mass_V = torch.zeros(40, dtype=torch.float64)
    mass_V[[3, 9, 17, 21, 39]] = 1.0
    chosen = select_vocabulary(mass_V, size=20)
    assert len(set(chosen.tolist())) == 20
    assert {3, 9, 17, 21, 39} <= set(chosen.tolist()) <= set(range(40))
