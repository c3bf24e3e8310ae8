"""What drafting is expected to yield in a step, before its block is drawn: from recent blocks.
It knows survivals and prices; which requests draft is for the caller to say.

Each of S scenarios holds one recent row of survivals for every request. The best budget is
searched in each scenario on its own: a mean row would hide that confident blocks are verified deep
and doubtful ones hardly. Nothing of the block to come takes part, so that a choice made from it is
exact under every coupling (Section 5.2).
Letters: S scenarios, R requests, K positions, B budgets 0, 1, ..
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.algorithms.prefix_scheduler import Prices
from dspark.algorithms.ranking import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """What a step that drafts is expected to give."""

    budget: int
    """The best one for all scenarios together."""
    rate: float
    """Tokens per second with the best budget of each scenario: what a plan that sees the block's
    own confidences can reach."""
    fixed_rate: float
    """The same with one budget for all of them: `budget`."""
    rates_B: Floats
    """Theta by budget, the mean of the scenarios."""


def foresee(survival_SRK: npt.NDArray[np.float32], prices: Prices, caps_R: Ints) -> Foresight:
    """Rates over the scenarios; `caps_R` 0 for requests that do not draft."""
    tokens_SB = _tokens(survival_SRK, prices.num_certain, caps_R)
    seconds_B = prices.seconds_B[: tokens_SB.shape[1]]
    tokens_SB = tokens_SB[:, : len(seconds_B)]
    best_S = (tokens_SB / seconds_B).argmax(1)
    num_scenarios = len(tokens_SB)
    tokens = tokens_SB[np.arange(num_scenarios), best_S].sum()
    rates_B = tokens_SB.sum(0) / (num_scenarios * seconds_B)
    budget = int(rates_B.argmax())
    return Foresight(
        budget=budget,
        rate=float(tokens / seconds_B[best_S].sum()),
        fixed_rate=float(rates_B[budget]),
        rates_B=rates_B,
    )


def _tokens(
    survival_SRK: npt.NDArray[np.float32], num_certain: int, caps_R: Ints
) -> npt.NDArray[np.float32]:
    """Expected tokens by budget when the likeliest are verified first: [S, B]."""
    num_scenarios, num_requests, block_size = survival_SRK.shape
    if num_requests == 1:  # in order as they are
        falling_SJ = survival_SRK[:, 0, : caps_R[0]]
    else:
        kept_SRK = survival_SRK * (np.arange(block_size) < caps_R[:, None])
        rising_SJ = np.sort(kept_SRK.reshape(num_scenarios, -1), axis=1)
        falling_SJ = rising_SJ[:, ::-1][:, : int(caps_R.sum())]
    tokens_SB = np.empty((num_scenarios, falling_SJ.shape[1] + 1), dtype=np.float32)
    tokens_SB[:, 0] = num_certain
    np.cumsum(falling_SJ, axis=1, out=tokens_SB[:, 1:])
    tokens_SB[:, 1:] += num_certain
    return tokens_SB
