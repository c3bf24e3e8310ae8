"""Rows of scores to tokens and probabilities: the fast twins of `algorithms.sampling`.

It knows no sampling parameter; scores arrive processed. Noise is that of `algorithms.noise`.
Each function takes the C++ path on a CPU and is `algorithms.sampling`'s own elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.algorithms import filters as reference
from dspark.algorithms import sampling
from dspark.algorithms.filters import Filter
from dspark.algorithms.sampling import RowOperators
from dspark.kernels import extension


def operators() -> RowOperators:
    """All of them, for `sampling.process_logits`."""
    return RowOperators(
        best=best,
        softmax=softmax,
        draw_categorical=draw_categorical,
        draw_shared=gumbel_argmax,
        filter_rows_=filter_rows_,
    )


def best(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Largest score of each row, NaN if one is NaN, and its lowest column, int64: both [N]."""
    if _has_fast_path(scores_NV):
        max_N, best_N = torch.ops.dspark.best(scores_NV)
        return max_N, best_N
    return sampling.best_columns(scores_NV)


def gumbel_argmax(
    scores_NV: Tensor, seeds_N: Tensor, positions_N: Tensor, token_ids_V: Tensor | None = None
) -> Tensor:
    """A draw from softmax(scores) of each row by the shared noise, token ids int64 [N].

    `scores_NV` float32: log-probabilities or logits over temperature, -inf excludes. The noise
    of a column is that of its token, `token_ids_V[column]` (the column itself without them).
    """
    if _has_fast_path(scores_NV):
        ids_N: Tensor = torch.ops.dspark.gumbel_argmax(
            scores_NV, seeds_N.contiguous(), positions_N.contiguous(), token_ids_V
        )
        return ids_N
    return sampling.draw_shared(scores_NV, seeds_N, positions_N, token_ids_V)


def softmax(scores_NV: Tensor) -> Tensor:
    """Float32 probabilities [N, V]; on the C++ path those of a row in an order of its own."""
    if _has_fast_path(scores_NV):
        probs_NV: Tensor = torch.ops.dspark.softmax(scores_NV)
        return probs_NV
    return sampling.softmax(scores_NV)


def draw_categorical(weights_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One column per row of float32 weights by the inverse of the cumulative sum, int64 [N]."""
    if _has_fast_path(weights_NV):
        columns_N: Tensor = torch.ops.dspark.draw_categorical(
            weights_NV, uniforms_N.to(torch.float64).contiguous()
        )
        return columns_N
    return sampling.draw_categorical(weights_NV, uniforms_N)


def filter_rows_(scores_NV: Tensor, filters: Sequence[Filter]) -> None:
    """Sets what a row's own filter drops to -inf in place; float32, maximum of each row 0.

    The C++ path keeps a prefix by its own exponentials, which differ from NumPy's in the last bit:
    a token on the very edge of top-p may be kept by one and not by the other.
    """
    if _has_fast_path(scores_NV):
        torch.ops.dspark.filter_rows(
            scores_NV,
            [tokens.top_k or 0 for tokens in filters],
            [tokens.top_p for tokens in filters],
            [tokens.min_p for tokens in filters],
        )
        return
    reference.filter_rows_(scores_NV, filters)


def _has_fast_path(scores_NV: Tensor) -> bool:
    return (
        extension.IS_LOADED
        and scores_NV.device.type == "cpu"
        and scores_NV.dtype in (torch.float32, torch.bfloat16)
    )


def _fake_best(scores_NV: Tensor) -> tuple[Tensor, Tensor]:
    size = scores_NV.shape[0]
    return (
        scores_NV.new_empty(size, dtype=torch.float32),
        scores_NV.new_empty(size, dtype=torch.int64),
    )


def _fake_draw(scores_NV: Tensor, *_: Tensor | None) -> Tensor:
    return scores_NV.new_empty(scores_NV.shape[0], dtype=torch.int64)


def _fake_softmax(scores_NV: Tensor) -> Tensor:
    return scores_NV.new_empty(scores_NV.shape, dtype=torch.float32)


if extension.IS_LOADED:
    torch.library.register_fake("dspark::best", _fake_best)
    torch.library.register_fake("dspark::gumbel_argmax", _fake_draw)
    torch.library.register_fake("dspark::draw_categorical", _fake_draw)
    torch.library.register_fake("dspark::softmax", _fake_softmax)
