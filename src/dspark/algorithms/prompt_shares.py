"""How a step's prompt tokens are shared among prompts that are being read. It knows counts only."""

from collections.abc import Sequence

_LEAST_PROMPT = 16
"""Prompt tokens of a step whose windows leave no room."""


def prompt_budget(num_windows: int, *, max_step_tokens: int, tokens_beside: int) -> int:
    """Prompt tokens of a step beside windows of so many tokens: at most `tokens_beside`, and a few
    even where windows fill the step's `max_step_tokens`; without windows the whole step."""
    if num_windows == 0:
        return max_step_tokens
    return min(tokens_beside, max(max_step_tokens - num_windows, _LEAST_PROMPT))


def prompt_shares(missing: Sequence[int], budget: int) -> list[int]:
    """Tokens that each prompt reads now, from what each still misses, the oldest first.

    Half of the budget is for all alike, so that a short prompt does not wait for a long one; what
    is left goes to the oldest, so that prompts end one after the other and not all at the end.
    """
    each = budget // 2 // max(len(missing), 1)
    shares = [min(count, each) for count in missing]
    rest = budget - sum(shares)
    for index, count in enumerate(missing):
        more = min(count - shares[index], rest)
        shares[index] += more
        rest -= more
    return shares
