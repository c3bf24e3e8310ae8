"""The order in which drafted tokens are admitted to verification: survival, position, request.
It knows survivals and limits, neither seconds nor tokens.

Letters: R requests, K positions, J candidates in the order of the ranking.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Survivals = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]

_LAST_KEY = np.uint64(2**64 - 1)
_REQUEST_BITS = 24
_MAX_BLOCK = 2**8
_SLOTS = np.arange(_MAX_BLOCK)
_SLOTS_K1 = _SLOTS[:, None]
_NO_REQUEST = np.zeros(_MAX_BLOCK, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Candidates (request, position) in the order in which they are admitted."""

    survival_J: Floats
    request_J: Ints
    slot_J: Ints
    """Position minus one."""
    num_requests: int
    num_least: int
    """The first of them are those that must be verified."""

    def lengths(self, budget: int) -> Ints:
        """Drafted tokens of each request among the first `budget` candidates: [R]."""
        return np.bincount(self.request_J[:budget], minlength=self.num_requests)

    def tokens(self, num_certain: int) -> Floats:
        """Expected tokens of a step for the budgets 0..J, `num_certain` of them in any case."""
        tokens_B = np.empty(len(self.survival_J) + 1)
        tokens_B[0] = num_certain
        # one term after the other: the sum up to a candidate never sees those behind it
        np.cumsum(self.survival_J, out=tokens_B[1:])
        tokens_B[1:] += num_certain
        return tokens_B


def rank(survival_RK: Survivals, caps_R: Ints, least_R: Ints | None = None) -> Ranking:
    """Sorts the candidates by falling survival, ties by position, then request.

    `survival_RK` falls along K. The first `least_R[r]` tokens of a request come before all others.
    Tokens beyond a cap, and those that cannot survive, are no candidates.
    """
    num_requests, block_size = survival_RK.shape
    assert block_size <= _MAX_BLOCK, "the sort key has 8 bits for the position"
    if num_requests == 1:
        return _in_order(survival_RK[0], int(caps_R[0]), 0 if least_R is None else int(least_R[0]))
    survival_RK = np.ascontiguousarray(survival_RK, dtype=np.float32)
    slot_K = np.arange(block_size)
    is_candidate_RK = (survival_RK > 0.0) & (slot_K < caps_R[:, None])
    # Bits of positive floats order as the floats do: one integer sort keeps all three criteria.
    falling_RK = np.invert(survival_RK.view(np.uint32)).astype(np.uint64)
    num_least = 0
    if least_R is not None:
        is_least_RK = slot_K < np.minimum(least_R, caps_R)[:, None]
        falling_RK[is_least_RK] = 0
        is_candidate_RK |= is_least_RK
        num_least = int(np.count_nonzero(is_least_RK))
    falling_RK <<= np.uint64(32)
    falling_RK |= _places(num_requests, block_size)
    num_candidates = int(np.count_nonzero(is_candidate_RK))
    if num_candidates < is_candidate_RK.size:
        falling_RK[~is_candidate_RK] = _LAST_KEY
    key_J = np.sort(falling_RK, axis=None)[:num_candidates]
    request_J = (key_J & np.uint64(2**_REQUEST_BITS - 1)).astype(np.int64)
    slot_J = ((key_J >> np.uint64(_REQUEST_BITS)) & np.uint64(_MAX_BLOCK - 1)).astype(np.int64)
    return Ranking(
        survival_J=survival_RK.ravel()[request_J * block_size + slot_J].astype(np.float64),
        request_J=request_J,
        slot_J=slot_J,
        num_requests=num_requests,
        num_least=num_least,
    )


def candidates(survival_RK: Survivals, caps_R: Ints) -> Survivals:
    """Survivals by position, 0 for what `rank` takes for no candidate: [K, R].

    For what can be found without the whole order, in a fraction of its time.
    """
    survival_KR = np.asarray(survival_RK.T, dtype=np.float32)
    return np.where(_SLOTS_K1[: len(survival_KR)] < caps_R, survival_KR, np.float32(0.0))


def lengths_down_to(value_KR: Survivals, last: np.float32, budget: int) -> Ints:
    """`Ranking.lengths` of a budget, whose last candidate survives so often: [R]."""
    lengths_R: Ints = (value_KR >= last).sum(0)
    surplus = int(lengths_R.sum()) - budget
    if surplus > 0:  # of equals the first ones stay, by position, then request
        request_J = np.nonzero(value_KR == last)[1]
        lengths_R -= np.bincount(request_J[-surplus:], minlength=len(lengths_R))
    return lengths_R


def _in_order(survival_K: Survivals, cap: int, least: int) -> Ranking:
    """The ranking of one request alone: its positions as they stand."""
    num_least = min(least, cap, len(survival_K))
    num_alive = int(np.count_nonzero(survival_K[:cap] > 0.0))
    count = max(num_least, num_alive)
    return Ranking(
        survival_J=survival_K[:count].astype(np.float64),
        request_J=_NO_REQUEST[:count],
        slot_J=_SLOTS[:count],
        num_requests=1,
        num_least=num_least,
    )


@lru_cache(maxsize=64)
def _places(num_requests: int, block_size: int) -> Keys:
    """Low half of the sort key, [R, K]: position, then request."""
    slot_K = np.arange(block_size, dtype=np.uint64) << np.uint64(_REQUEST_BITS)
    place_RK = slot_K | np.arange(num_requests, dtype=np.uint64)[:, None]
    place_RK.flags.writeable = False  # every plan of this shape shares it
    return place_RK
