"""Terms of a step whose text may depend on what is verified: a price, and how many tokens at most.
It knows survivals and seconds of blocks that are over, nothing of the block to come, so that what
keeps to the terms is exact under every coupling.

A token that survives with a chance above the price is verified, the best ones first, until so many
are. Where every token of the pass costs the same, the price alone is right; where seconds are
shelves (nothing up to 8 tokens, much beyond them), the number is. Both are what would have gained
most on recent blocks.
Letters: P prices, H recent blocks, R requests that draft, K positions, B budgets 0..R K.
"""

from typing import NamedTuple

import numpy as np

from dspark.algorithms.foresight import Blocks
from dspark.algorithms.ranking import Floats

PRICES = (0.0, 0.01, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
"""That are compared."""


class Terms(NamedTuple):
    """What the tokens of a block to come have to keep to."""

    price: float
    """The survival that a token has to exceed."""
    most: int
    """Tokens of all requests together."""


def gains(blocks_RHK: Blocks, *, second: float, verify_B: Floats) -> Floats:
    """Tokens less what their seconds are worth, on average of the blocks, at all terms: [P, B].

    `second`: tokens that a second is worth; `verify_B`: seconds of a pass by drafted tokens.
    """
    num_requests, num_blocks, block_size = blocks_RHK.shape
    most = num_requests * block_size
    best_HJ = -np.sort(-blocks_RHK.transpose(1, 0, 2).reshape(num_blocks, most), axis=1)
    gain_HB = np.empty((num_blocks, most + 1))
    gain_HB[:, 0] = 0.0
    np.cumsum(best_HJ, axis=1, out=gain_HB[:, 1:])
    gain_HB -= second * (verify_B[: most + 1] - verify_B[0])
    # by budgets, then what each price leaves of them
    count_PH = (best_HJ > np.array(PRICES, dtype=np.float32)[:, None, None]).sum(2)
    budget_PHB = np.minimum(count_PH[:, :, None], np.arange(most + 1))
    gain_PB: Floats = gain_HB[np.arange(num_blocks)[:, None], budget_PHB].mean(1)
    return gain_PB


def best(gain_PB: Floats) -> Terms:
    """The terms that gain most; of equals, the highest price."""
    highest_B = gain_PB[::-1].max(1)
    place = len(PRICES) - 1 - int(highest_B.argmax())
    return Terms(price=PRICES[place], most=int(gain_PB[place].argmax()))
