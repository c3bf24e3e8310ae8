"""Whose drafts are expected to pay in a step, before its block is drawn: from recent blocks.
It knows survivals and seconds; nothing of the block to come takes part, so that a choice made from
it is exact under every coupling (Section 5.2).

A second has a worth: the tokens that the service makes of it in the long run. Then

    gain of a step    its tokens - worth * its seconds

is what a policy has to maximise in every step. The rate of the single step, tokens / seconds, is
maximal elsewhere: it verifies too much where the step is slow anyway (a doubtful block, a prompt
in the same pass) and too little where it goes well. At the highest rate that can be had in the
long run the largest gain is 0 (Dinkelbach 1967).

A request drafts if its recent blocks, each cut where its gain was largest, earned more than the
drafter's part costs.
Letters: H recent blocks of a request, R requests, K positions, N 0..R requests that draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.algorithms.ranking import Floats, Ints

Blocks = npt.NDArray[np.float32]
"""Survivals of recent blocks: [R, H, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What drafting has to be weighed against; known before the draft."""

    second: float
    """Tokens that a second is worth."""
    token_seconds: float
    """What a token in the pass costs, on average of as many as are usual."""
    draft_seconds_N: Sequence[float]
    """The drafter's part for 0, 1, .. requests; nothing for 0."""

    @property
    def price(self) -> float:
        """The survival from which a drafted token is worth its verification."""
        return self.second * self.token_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """What drafting is expected to bring."""

    drafting: Sequence[int]
    """The requests for which it pays, rising."""
    verified: float
    """Drafted tokens that they will have verified, on average."""
    accepted: float
    """Those of them that survive."""
    gains_R: Sequence[float]
    """Tokens that each request's blocks gain beyond what their verification is worth."""


def foresee(
    blocks_RHK: Blocks, worth: Worth, caps_R: Ints, *, head_start_R: Floats | None = None
) -> Foresight:
    """Who should draft; `caps_R` 0 for requests that cannot.

    `head_start_R`: gain that each is given beforehand, so that noise does not change who drafts.
    """
    num_requests, num_blocks, block_size = blocks_RHK.shape
    over_RHK = blocks_RHK - np.float32(worth.price)
    if int(caps_R.min(initial=block_size)) < block_size:
        over_RHK = np.where(np.arange(block_size) < caps_R[:, None, None], over_RHK, -1.0)
    # over falls along a block, so the best cut keeps just what is positive
    kept_RHK = over_RHK > 0.0
    gains_R = np.where(kept_RHK, over_RHK, np.float32(0.0)).sum((1, 2)) / num_blocks
    verified_R = kept_RHK.sum((1, 2)) / num_blocks
    ranked_R = gains_R if head_start_R is None else gains_R + head_start_R
    order_R = np.argsort(-ranked_R, kind="stable")
    drafts_N = np.asarray(worth.draft_seconds_N)[: num_requests + 1]
    net_N = -worth.second * drafts_N
    net_N[1:] += np.cumsum(ranked_R[order_R])
    able = int(np.count_nonzero(caps_R))
    chosen_R = np.sort(order_R[: int(net_N[: able + 1].argmax())])
    verified = float(verified_R[chosen_R].sum())
    return Foresight(
        drafting=chosen_R.tolist(),
        verified=verified,
        accepted=float(gains_R[chosen_R].sum()) + worth.price * verified,
        gains_R=gains_R.tolist(),
    )
