"""Step costs whose truth is known, for tests and simulations without a machine."""

from collections.abc import Callable, Sequence

import numpy as np

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.step_cost import ContextCost, SampledCost, StepCost, VerifyRow

BLOCK = 5
FINGERPRINT = Fingerprint.of(target="toy", dtype="fp32", threads=2)


def curve(sizes: Sequence[int], seconds: Callable[[int], float], **options) -> CostCurve:
    return CostCurve(
        sizes=tuple(sizes),
        seconds=tuple(seconds(size) for size in sizes),
        errors=(0.0,) * len(sizes),
        **options,
    )


def linear_cost(
    *,
    base: float = 20e-3,
    per_request: float = 1e-3,
    per_token: float = 1e-3,
    draft_base: float = 3e-3,
    draft_per_request: float = 0.3e-3,
    context_cost: ContextCost | None = None,
) -> StepCost:
    """T = base + per_request R + per_token B + draft: affine, so that lookups are exact."""
    return StepCost(
        fingerprint=FINGERPRINT,
        block_size=BLOCK,
        context=100,
        draft=curve((1, 64), lambda n: draft_base + draft_per_request * n),
        verify=tuple(
            VerifyRow(
                num_requests=n,
                curve=curve(
                    (n, n * (BLOCK + 1)), lambda b, n=n: base + per_request * n + per_token * b
                ),
            )
            for n in (1, 4, 16, 64)
        ),
        context_cost=context_cost or ContextCost(),
    )


def sampled_cost(*, per_row: float, per_request: float = 0.0) -> SampledCost:
    """`per_row` for each anchor and draft, `per_request` for each block."""
    return SampledCost(
        draft=curve((0, 64), lambda n: per_request * n),
        verify=tuple(
            VerifyRow(
                num_requests=n, curve=curve((0, n, n * (BLOCK + 1)), lambda rows: per_row * rows)
            )
            for n in (1, 64)
        ),
    )


def seconds_of(cost: StepCost, num_requests: int, num_tokens: int, *, context: int | None = None):
    total = num_requests * cost.context if context is None else context
    return float(cost.verify_seconds(num_requests, np.array([num_tokens]), np.array([total]))[0])


def draft_seconds_of(cost: StepCost, num_drafting: int, *, context: int | None = None) -> float:
    total = num_drafting * cost.context if context is None else context
    return float(cost.draft_seconds(np.array([num_drafting]), np.array([total]))[0])
