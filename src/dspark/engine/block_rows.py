"""Blocks over some of a step's requests as one over all of them. It knows rows, no request."""

from collections.abc import Sequence

from torch import Tensor

from dspark.core import DraftBlock


def merged(*parts: tuple[Sequence[int], DraftBlock], num_rows: int) -> DraftBlock:
    """One block of `num_rows`: row `rows[i]` of it is row i of its part, rows of none are zeros.

    Either all parts say how many tokens they offer, or none does.
    """

    def joined(name: str) -> Tensor | None:
        given = [(rows, getattr(block, name)) for rows, block in parts]
        first = next((values for _, values in given if values is not None), None)
        if first is None:
            return None
        whole: Tensor = first.new_zeros((num_rows, *first.shape[1:]))
        for rows, values in given:
            if values is not None:
                whole[list(rows)] = values
        return whole

    tokens_RK = joined("tokens_RK")
    assert tokens_RK is not None
    offered = None
    if all(block.num_offered is not None for _, block in parts):
        offered = [0] * num_rows
        for rows, block in parts:
            for row, count in zip(rows, block.num_offered or (), strict=True):
                offered[row] = count
    return DraftBlock(
        tokens_RK=tokens_RK,
        probs_RKS=joined("probs_RKS"),
        confidence_RK=joined("confidence_RK"),
        num_offered=offered,
        is_certain=all(block.is_certain for _, block in parts),
    )
