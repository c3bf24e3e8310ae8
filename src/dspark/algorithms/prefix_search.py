"""How much of a row's ranking top-k and top-p keep, found without sorting the row.
It knows the scores of one row, unordered; it never changes them.

Definition, `prefix_by_sort`: a token's mass is exp(score) in float32; masses are summed in
float64 from the largest down, token by token; top-p keeps up to the first token at which the
running sum reaches top_p times the whole sum.

`leading_prefix` gives that very prefix. It adds the whole in another order, which moves both sides
of the comparison by roundings alone. So it trusts a comparison only if the two sides are further
apart than all roundings together, and goes back to the definition otherwise: where a few equal
scores meet `top_p` exactly, and by chance about once in a million rows of a language model.
Letters: V vocabulary, C some of the scores.
"""

import math

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float32]

# A row is cut into this many parts, whose maxima give a floor under the largest few scores.
_NUM_PARTS = 1024
# From here on a sort costs less than another halving.
_SORTED_AT_ONCE = 4096


def leading_prefix(scores_V: Scores, *, top_k: int | None, top_p: float) -> tuple[int, float]:
    """Number of tokens that top-k and then top-p keep, at least 1, and the last one's score.

    `scores_V` has the maximum 0; its tokens rank by score.
    """
    lead_C = scores_V if top_k is None else _largest(scores_V, top_k)
    if top_p == 1.0:
        return lead_C.size, float(lead_C.min())
    found = None
    if lead_C.size > _SORTED_AT_ONCE:
        found = _find(lead_C, top_p)
    return prefix_by_sort(lead_C, top_k=None, top_p=top_p) if found is None else found


def prefix_by_sort(scores_V: Scores, *, top_k: int | None, top_p: float) -> tuple[int, float]:
    """The same as `leading_prefix`, by its definition; slow for long rows."""
    lead_C = _descending(scores_V)[:top_k]
    num_kept = lead_C.size
    if top_p < 1.0:
        running_C = np.cumsum(_masses(lead_C), dtype=np.float64)
        num_kept = int(np.searchsorted(running_C, top_p * running_C[-1])) + 1
    return num_kept, float(lead_C[num_kept - 1])


def _find(scores_V: Scores, top_p: float) -> tuple[int, float] | None:
    """Top-p's prefix, `None` if roundings could decide it."""
    size = scores_V.size
    total = _mass(scores_V)
    wanted = top_p * total
    # Each of the four sums errs by at most size * eps / 2 of the total; twice all of that.
    slack = 4 * size * float(np.finfo(np.float64).eps) * total
    # Tokens this small hold less than 1 - top_p of the mass, all together.
    floor = math.log((1.0 - top_p) * total / size) - 1e-3
    rest_C = _largest(scores_V, int(np.count_nonzero(scores_V >= floor)), floor)
    before, num_before = 0.0, 0
    while rest_C.size > _SORTED_AT_ONCE:
        half = rest_C.size // 2
        parted_C = np.partition(rest_C, half)
        mass = before + _mass(parted_C[half:])
        if abs(mass - wanted) <= slack:
            return None
        if mass > wanted:
            rest_C = parted_C[half:]
        else:
            before, num_before = mass, num_before + rest_C.size - half
            rest_C = parted_C[:half]
    lead_C = _descending(rest_C)
    running_C = before + np.cumsum(_masses(lead_C), dtype=np.float64)
    index = int(np.searchsorted(running_C, wanted))
    if np.any(np.abs(running_C[max(index - 1, 0) : index + 1] - wanted) <= slack):
        return None
    return num_before + index + 1, float(lead_C[index])


def _largest(scores_V: Scores, count: int, floor: float | None = None) -> Scores:
    """The `count` largest scores, unordered; `floor`, if given, is what just these reach."""
    size = scores_V.size
    if count >= size:
        return scores_V
    if floor is None and count <= _NUM_PARTS // 4 and size >= 4 * _NUM_PARTS:
        # `count` parts hold a score no smaller than this maximum, so the largest are none smaller.
        whole = size - size % _NUM_PARTS
        maxima = scores_V[:whole].reshape(-1, _NUM_PARTS).max(0)
        scores_V = scores_V[scores_V >= np.partition(maxima, -count)[-count]]
    elif floor is not None and count <= size // 16:
        return scores_V[scores_V >= floor]
    return np.partition(scores_V, -count)[-count:]


def _descending(scores_C: Scores) -> Scores:
    return -np.sort(-scores_C)


def _masses(scores_C: Scores) -> Scores:
    # NumPy's exp depends on the value alone, not on its place in the row.
    return np.exp(scores_C)


def _mass(scores_C: Scores) -> float:
    return float(_masses(scores_C).sum(dtype=np.float64))
