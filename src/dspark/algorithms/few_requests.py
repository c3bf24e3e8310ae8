"""Foresight and the searches for few requests, in plain arithmetic.

The same numbers as `foresight.foresee` and `prefix_scheduler.free_gain`, `priced`, `causal` and
`admit` without floors: for a handful of candidates a call for an array costs more than the
arithmetic, and a step of one request lasts only milliseconds. It knows survivals, seconds and caps.
Letters: H recent blocks, R requests, K positions, J candidates, B budgets 0, 1, ..
"""

from collections.abc import Sequence

from dspark.algorithms.foresight import Foresight, Worth

Rows = Sequence[Sequence[float]]
"""Survivals of each request: [R][K]."""


def foresee_few(
    blocks: Sequence[Rows],
    worth: Worth,
    caps: Sequence[int],
    *,
    head_start: Sequence[float] | None = None,
) -> Foresight:
    """`foresight.foresee` over recent blocks [R][H][K]."""
    price, gains, verified = worth.price, [], []
    for rows, cap in zip(blocks, caps, strict=True):
        gain, count = 0.0, 0
        for row in rows:
            for value in row[:cap]:
                if value <= price:
                    break
                gain += value - price
                count += 1
        gains.append(gain / len(rows))
        verified.append(count / len(rows))
    ranked = gains
    if head_start is not None:
        ranked = [gain + more for gain, more in zip(gains, head_start, strict=True)]
    order = sorted((r for r, cap in enumerate(caps) if cap > 0), key=lambda r: -ranked[r])
    best, best_net, total = 0, 0.0, 0.0
    for count, r in enumerate(order, start=1):
        total += ranked[r]
        net = total - worth.second * worth.draft_seconds_N[count]
        if net > best_net:
            best, best_net = count, net
    chosen = sorted(order[:best])
    num_verified = sum(verified[r] for r in chosen)
    return Foresight(
        drafting=chosen,
        verified=num_verified,
        accepted=sum(gains[r] for r in chosen) + price * num_verified,
        gains_R=gains,
    )


def foresee_alone(
    rows: Rows, seconds_B: Sequence[float], cap: int, *, worth: float
) -> tuple[Foresight, float]:
    """What a lone request's blocks [H][K] would bring, each verified as `stepped` has it, and the
    mean seconds of those passes.

    A price by the token is the rate of a slope, but the shelves of a lone request are as wide as
    what it verifies: at the mean price lengths beyond a shelf looked worth it, and then the whole
    draft did not.
    """
    lengths = [stepped(row, seconds_B, cap, worth=worth) for row in rows]
    count, verified = len(rows), sum(lengths)
    accepted = sum(sum(row[:length]) for row, length in zip(rows, lengths, strict=True)) / count
    seconds = sum(seconds_B[length] for length in lengths) / count
    foresight = Foresight(
        drafting=[0] if verified else [],
        verified=verified / count,
        accepted=accepted,
        gains_R=[accepted - worth * (seconds - seconds_B[0])],
    )
    return foresight, seconds


def free_few(
    rows: Rows, seconds_B: Sequence[float], caps: Sequence[int], *, worth: float
) -> list[int]:
    """`prefix_scheduler.free_gain`: lengths of each request."""
    candidates = _candidates(rows, caps)
    best, tokens, least = 0, 0.0, worth * seconds_B[0]
    for budget, (value, _, _) in enumerate(candidates[: len(seconds_B) - 1], start=1):
        tokens -= value
        loss = worth * seconds_B[budget] - tokens
        if loss < least:
            best, least = budget, loss
    return _lengths(candidates, best, len(rows))


def priced_few(
    rows: Rows, caps: Sequence[int], *, price: float, most: int | None = None
) -> list[int]:
    """`prefix_scheduler.priced`: lengths of each request."""
    lengths = []
    for row, cap in zip(rows, caps, strict=True):
        length = 0
        for value in row[:cap]:
            if value <= price:
                break
            length += 1
        lengths.append(length)
    if most is not None and sum(lengths) > most:
        return _lengths(_candidates(rows, lengths), most, len(rows))
    return lengths


def stepped(row: Sequence[float], seconds_B: Sequence[float], cap: int, *, worth: float) -> int:
    """`priced` for a lone request [K] whose every position has the price of its own step: length.

    Whether a position is admitted rests on survivals up to it and on what was known before the
    block, so it is exact under every coupling, as one price for all positions is.
    """
    for length, value in enumerate(row[: min(cap, len(seconds_B) - 1)]):
        if value <= worth * (seconds_B[length + 1] - seconds_B[length]):
            return length
    return min(cap, len(seconds_B) - 1)


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
