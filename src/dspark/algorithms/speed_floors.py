"""Floors on the speed of single requests, in tokens per second: which budgets keep them.
It knows survivals and seconds; it does not choose a budget.

A request keeps its floor f if its expected tokens / seconds(b) >= f. Other requests' drafts make
the step longer, its own drafts earn it tokens.
Letters: R requests, K positions, J candidates, B budgets 0..J.
"""

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Floats, Ints, Ranking, Survivals

Flags = npt.NDArray[np.bool_]


def least_lengths(
    survival_RK: Survivals,
    floors_R: Floats,
    caps_R: Ints,
    *,
    seconds_B: Floats,
    plain_seconds: float | None,
) -> tuple[Ints, Floats]:
    """The fewest drafted tokens of each request that keep all floors, and those floors: [R], [R].

    More tokens make the step longer, so that every floor asks for more of them: the lengths grow
    from zero to the least fixed point. A floor that no choice can keep comes back as 0.
    """
    # a longer step that was measured to be quicker must not make the iteration swing
    seconds_B = np.maximum.accumulate(seconds_B)
    expected_RB = _expected(survival_RK)
    floors_R = floors_R.copy()
    least_R = np.zeros(len(survival_RK), dtype=np.int64)
    while True:
        total = int(least_R.sum())
        seconds = float(seconds_B[total])
        if total == 0 and plain_seconds is not None:
            seconds = plain_seconds
        wanted_R = (expected_RB < (floors_R * seconds)[:, None]).sum(1)
        is_out_R = wanted_R > caps_R
        if not is_out_R.any() and wanted_R.sum() >= len(seconds_B):
            is_out_R[int(np.argmax(wanted_R))] = True
        if is_out_R.any():
            floors_R[is_out_R] = 0.0
            least_R[:] = 0
        elif (wanted_R == least_R).all():
            return least_R, floors_R
        else:
            least_R = wanted_R


def keeps_floors(
    ranking: Ranking, survival_RK: Survivals, floors_R: Floats, seconds_B: Floats
) -> Flags:
    """Whether every request keeps its floor, by budget: [B], as long as the shorter of both.

    Expected tokens of a request only grow with the budget. So its value at budget b is the value
    that it leaves with its next candidate, and the smallest value of all requests is the smallest
    of those left behind from there on: one running minimum from the end.
    """
    expected_RB = _expected(survival_RK)
    with np.errstate(divide="ignore"):
        # seconds that a step may take for the sake of each request
        allowed_RB = expected_RB / floors_R[:, None]
    left_B = np.empty(len(ranking.request_J) + 1)
    left_B[:-1] = allowed_RB[ranking.request_J, ranking.slot_J]
    last_R = ranking.lengths(len(ranking.request_J))
    left_B[-1] = allowed_RB[np.arange(len(last_R)), last_R].min(initial=np.inf)
    least_B = np.minimum.accumulate(left_B[::-1])[::-1]
    num_budgets = min(len(least_B), len(seconds_B))
    is_kept_B: Flags = least_B[:num_budgets] >= seconds_B[:num_budgets]
    return is_kept_B


def _expected(survival_RK: Survivals) -> Floats:
    """Tokens that a request expects from 0..K verified drafts: [R, K + 1]."""
    num_requests, block_size = survival_RK.shape
    expected_RB = np.ones((num_requests, block_size + 1))
    expected_RB[:, 1:] = survival_RK
    return np.cumsum(expected_RB, axis=1)
