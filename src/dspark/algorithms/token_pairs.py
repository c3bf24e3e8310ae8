"""Which token follows which, as a sequential head of low rank: a start that is better than noise.

It counts and factorises; it knows no drafter and no file. Letters: N pairs, P distinct pairs,
V target vocabulary, S draft vocabulary, r rank.
"""

import torch
from torch import Tensor

SMOOTHING = 20.0
"""Observations that the overall frequencies count as, beside those of one previous token."""
_OVERSAMPLING = 16
_ITERATIONS = 3
_RAREST = 1e-5
"""Frequency below which a token weighs no less: rows of W2 stay bounded."""


def pair_bias(
    previous_N: Tensor, column_N: Tensor, *, vocab_size: int, draft_vocab_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    """W1 [V, r] and W2 [S, r], float32, from which token came after which.

    `previous_N` are target ids, `column_N` columns of the draft vocabulary. The bias of a row,
    added to log frequencies, gives the smoothed frequencies after that token: with n of m pairs
    and a frequency p, log(1 + n / (SMOOTHING p)). The factors are the best of their rank where
    a pair weighs as much as its row and its column are frequent. The same counts give the same
    bits on one machine. Tokens that nothing was counted for have rows of zeros.
    """
    frequency_S = torch.bincount(column_N, minlength=draft_vocab_size).float() + 0.5
    frequency_S /= frequency_S.sum()
    count_V = torch.bincount(previous_N, minlength=vocab_size)
    rows_V = count_V.clamp(min=1).float().sqrt()
    columns_S = (frequency_S + _RAREST).sqrt()
    pair_P, count_P = torch.unique(previous_N * draft_vocab_size + column_N, return_counts=True)
    row_P, column_P = pair_P // draft_vocab_size, pair_P % draft_vocab_size
    value_P = torch.log1p(count_P.float() / (SMOOTHING * frequency_S[column_P]))
    weighted_VS = torch.sparse_coo_tensor(
        torch.stack((row_P, column_P)),
        value_P * rows_V[row_P] * columns_S[column_P],
        (vocab_size, draft_vocab_size),
        check_invariants=False,
    ).coalesce()
    left_Vr, size_r, right_Sr = _largest(weighted_VS, rank)
    w1_Vr = left_Vr * size_r.sqrt() * ((count_V > 0) / rows_V)[:, None]
    w2_Sr = right_Sr * size_r.sqrt() / columns_S[:, None]
    # Entries of both of one size where they are used: Adam's steps are of one size too.
    balance = (_rms(w2_Sr) / _rms(w1_Vr[previous_N]).clamp(min=1e-12)).sqrt()
    return w1_Vr * balance, w2_Sr / balance.clamp(min=1e-12)


def _largest(matrix_VS: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values and their vectors, by subspace iteration from a fixed seed.

    Halko, Martinsson and Tropp 2011, algorithm 4.4. Ranks that the matrix lacks are zeros.
    """
    num_columns = matrix_VS.shape[1]
    generator = torch.Generator().manual_seed(0)
    width = min(rank + _OVERSAMPLING, *matrix_VS.shape)
    start_SQ = torch.randn(num_columns, width, generator=generator)
    base_VQ = torch.linalg.qr(torch.sparse.mm(matrix_VS, start_SQ)).Q
    transposed_SV = matrix_VS.t().coalesce()
    for _ in range(_ITERATIONS):
        base_SQ = torch.linalg.qr(torch.sparse.mm(transposed_SV, base_VQ)).Q
        base_VQ = torch.linalg.qr(torch.sparse.mm(matrix_VS, base_SQ)).Q
    small_SQ = torch.sparse.mm(transposed_SV, base_VQ)
    right_SQ, size_Q, left_QQ = torch.linalg.svd(small_SQ, full_matrices=False)
    lacking = max(0, rank - width)
    left_VQ = torch.nn.functional.pad(base_VQ @ left_QQ.T, (0, lacking))
    right_SQ = torch.nn.functional.pad(right_SQ, (0, lacking))
    size_Q = torch.nn.functional.pad(size_Q, (0, lacking))
    return left_VQ[:, :rank], size_Q[:rank], right_SQ[:, :rank]


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
