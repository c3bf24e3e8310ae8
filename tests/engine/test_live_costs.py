"""Step costs in service: by what the requests of a step ask for."""

from dataclasses import replace

import numpy as np
import pytest

from dspark.engine.live_costs import LiveCosts
from tests.algorithms.toy_costs import linear_cost, sampled_cost

COST = replace(linear_cost(), sampled=sampled_cost(per_row=3e-4, per_request=1e-4))


@pytest.mark.parametrize("num_prompt_tokens", [0, 64])
def test_a_batch_of_both_kinds_costs_in_proportion(num_prompt_tokens: int) -> None:
    """Prompts in the same step have no rows of logits, so nothing is drawn from them."""
    costs = LiveCosts(COST)
    greedy, half, sampled = (
        costs.seconds(4, num_prompt_tokens, 400, sampled=share) for share in (0.0, 0.5, 1.0)
    )
    rows_B = 4 + np.arange(len(greedy.verify_B))
    np.testing.assert_allclose(sampled.verify_B - greedy.verify_B, 3e-4 * rows_B)
    np.testing.assert_allclose(half.verify_B, (greedy.verify_B + sampled.verify_B) / 2)
    np.testing.assert_allclose(sampled.draft_N - greedy.draft_N, 1e-4 * np.arange(5))
    assert sampled.of_token(8.0, 4) == pytest.approx(greedy.of_token(8.0, 4) + 3e-4)
