"""One token per row of scores: the best, or the best after Gumbel noise (an exact draw).

It knows no sampling parameter; scores arrive processed. Noise is that of `algorithms.noise`.
"""

import torch
from torch import Tensor

from dspark.algorithms import noise
from dspark.kernels import extension


def argmax(scores_NV: Tensor) -> Tensor:
    """Column of each row's largest score, int64 [N]; the lowest of equals.

    NaN never wins on the C++ path, and always in PyTorch: check for it elsewhere.
    """
    if (
        extension.IS_LOADED
        and scores_NV.device.type == "cpu"
        and scores_NV.dtype in (torch.float32, torch.bfloat16)
    ):
        ids_N: Tensor = torch.ops.dspark.argmax(scores_NV)
        return ids_N
    return scores_NV.argmax(dim=-1)


def gumbel_argmax(
    scores_NV: Tensor, seeds_N: Tensor, positions_N: Tensor, token_ids_V: Tensor | None = None
) -> Tensor:
    """A draw from softmax(scores) of each row by the shared noise, token ids int64 [N].

    `scores_NV` float32: log-probabilities or logits over temperature, -inf excludes. The noise
    of a column is that of its token, `token_ids_V[column]` (the column itself without them).
    """
    if extension.IS_LOADED and scores_NV.device.type == "cpu":
        ids_N: Tensor = torch.ops.dspark.gumbel_argmax(scores_NV, seeds_N, positions_N, token_ids_V)
        return ids_N
    if token_ids_V is None:
        token_ids_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
    keys_N = noise.row_keys(seeds_N, positions_N, noise.Stream.TOKEN)
    columns_N = (scores_NV.double() + noise.gumbel(keys_N, token_ids_V)).argmax(dim=-1)
    return token_ids_V[columns_N]


def _fake_argmax(scores_NV: Tensor) -> Tensor:
    return scores_NV.new_empty(scores_NV.shape[0], dtype=torch.int64)


def _fake_gumbel_argmax(
    scores_NV: Tensor, _seeds_N: Tensor, _positions_N: Tensor, _token_ids_V: Tensor | None
) -> Tensor:
    return scores_NV.new_empty(scores_NV.shape[0], dtype=torch.int64)


if extension.IS_LOADED:
    torch.library.register_fake("dspark::argmax", _fake_argmax)
    torch.library.register_fake("dspark::gumbel_argmax", _fake_gumbel_argmax)
