"""Foresight and the searches for few requests, in plain arithmetic.

The same numbers as `foresight.foresee` and `prefix_scheduler.free`, `causal` and `admit` without
floors: for a handful of candidates a call for an array costs more than the arithmetic, and a step
of one request lasts only milliseconds. It knows survivals, seconds and caps.
Letters: S scenarios, R requests, K positions, J candidates, B budgets 0, 1, ..
"""

from collections.abc import Sequence

import numpy as np

from dspark.algorithms.foresight import Foresight

Rows = Sequence[Sequence[float]]
"""Survivals of each request: [R][K]."""


def foresee_few(
    rows_SR: Sequence[Rows], seconds_B: Sequence[float], caps: Sequence[int], num_certain: int
) -> Foresight:
    """`foresight.foresee` over scenarios [S][R][K]; `caps` 0 for requests that do not draft."""
    num_budgets = min(sum(caps) + 1, len(seconds_B))
    totals_B = [0.0] * num_budgets
    best_tokens = best_seconds = 0.0
    for rows in rows_SR:
        falling = sorted(
            (value for row, cap in zip(rows, caps, strict=True) for value in row[:cap]),
            reverse=True,
        )
        tokens, best_rate, pair = float(num_certain), -1.0, (0.0, 0.0)
        for budget in range(num_budgets):
            if budget:
                tokens += falling[budget - 1]
            totals_B[budget] += tokens
            seconds = seconds_B[budget]
            if tokens > best_rate * seconds:
                best_rate, pair = tokens / seconds, (tokens, seconds)
        best_tokens += pair[0]
        best_seconds += pair[1]
    rates_B = [
        total / (len(rows_SR) * seconds)
        for total, seconds in zip(totals_B, seconds_B, strict=False)
    ]
    fixed_rate = max(rates_B)
    return Foresight(
        budget=rates_B.index(fixed_rate),
        rate=best_tokens / best_seconds,
        fixed_rate=fixed_rate,
        rates_B=np.array(rates_B),
    )


def free_few(
    rows: Rows, seconds_B: Sequence[float], caps: Sequence[int], num_certain: int
) -> list[int]:
    """`prefix_scheduler.free` of a drafted block: lengths of each request."""
    candidates = _candidates(rows, caps)
    tokens = float(num_certain)
    best, best_rate = 0, tokens / seconds_B[0]
    for budget, (value, _, _) in enumerate(candidates[: len(seconds_B) - 1], start=1):
        tokens -= value
        rate = tokens / seconds_B[budget]
        if rate > best_rate:
            best, best_rate = budget, rate
    return _lengths(candidates, best, len(rows))


def causal_few(
    rows: Rows, seconds_B: Sequence[float], caps: Sequence[int], num_certain: int
) -> list[int]:
    """`prefix_scheduler.causal`: the walk stops at the first step that does not improve."""
    candidates = _candidates(rows, caps)
    tokens = float(num_certain)
    rate, budget = tokens / seconds_B[0], 0
    for value, _, _ in candidates[: len(seconds_B) - 1]:
        tokens -= value
        before, rate = rate, tokens / seconds_B[budget + 1]
        if rate <= before:
            break
        budget += 1
    return _lengths(candidates, budget, len(rows))


def admit_few(rows: Rows, budget: int, caps: Sequence[int]) -> list[int]:
    """`prefix_scheduler.admit`: the best `budget` candidates."""
    return _lengths(_candidates(rows, caps), budget, len(rows))


def _candidates(rows: Rows, caps: Sequence[int]) -> list[tuple[float, int, int]]:
    """(-survival, position, request) by falling survival, ties by position, then request."""
    found = [
        (-value, slot, r)
        for r, (row, cap) in enumerate(zip(rows, caps, strict=True))
        for slot, value in enumerate(row[:cap])
        if value > 0.0
    ]
    if len(rows) > 1:  # a request alone has them in order
        found.sort()
    return found


def _lengths(
    candidates: Sequence[tuple[float, int, int]], budget: int, num_requests: int
) -> list[int]:
    if num_requests == 1:
        return [min(budget, len(candidates))]
    lengths = [0] * num_requests
    for _, _, r in candidates[:budget]:
        lengths[r] += 1
    return lengths
