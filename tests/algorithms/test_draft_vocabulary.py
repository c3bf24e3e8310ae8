"""Both directions of the map between draft columns and target ids."""

import torch

from dspark.algorithms.draft_vocabulary import DraftVocabulary


def test_columns_invert_the_map_and_leave_out_other_tokens():
    vocabulary = DraftVocabulary.of(torch.tensor([7, 0, 3], dtype=torch.int32), vocab_size=9)
    assert vocabulary.size == 3
    assert vocabulary.d2t_S.dtype == torch.int64
    assert vocabulary.column_V[vocabulary.d2t_S].tolist() == [0, 1, 2]
    assert vocabulary.columns(torch.tensor([3, 8, 7, 1])).tolist() == [2, 0]
    assert (vocabulary.column_V == 3).sum() == 6
