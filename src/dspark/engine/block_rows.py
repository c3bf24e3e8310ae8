"""Blocks over some of a step's requests as one over all of them. It knows rows, no request."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dspark.core import DraftBlock


def merged(*parts: tuple[Sequence[int], DraftBlock], num_rows: int) -> DraftBlock:
    """One block of `num_rows`: row `rows[i]` of it is row i of its part, rows of none are zeros.

    Either all parts say how many tokens they offer, or none does; who says nothing of copies has
    none.
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
    return DraftBlock(
        tokens_RK=tokens_RK,
        probs_RKS=joined("probs_RKS"),
        confidence_RK=joined("confidence_RK"),
        num_offered=_spread(parts, "num_offered", 0, num_rows),
        is_certain=all(block.is_certain for _, block in parts),
        is_copied=_spread(parts, "is_copied", False, num_rows),
    )


def _spread(
    parts: Sequence[tuple[Sequence[int], DraftBlock]], name: str, none: Any, num_rows: int
) -> list[Any] | None:
    """What is told by row; `none` for rows of parts that do not tell it."""
    if all(getattr(block, name) is None for _, block in parts):
        return None
    found = [none] * num_rows
    for rows, block in parts:
        values = getattr(block, name)
        if values is not None:
            for row, value in zip(rows, values, strict=True):
                found[row] = value
    return found
