"""What steps of several tokens add up to."""

import pytest

from dspark.benchmarks.load.tally import Tally
from dspark.core import FinishReason, Origin, RoundResult, StepResult


def a_round(num_tokens: int, *, num_planned: int, is_prefill: bool = False) -> RoundResult:
    return RoundResult(
        request_id="a",
        token_ids=list(range(num_tokens)),
        origins=[Origin.PLAIN] * num_tokens,
        logprobs=None,
        num_offered=num_planned,
        num_planned=num_planned,
        num_accepted=num_tokens - 1,
        is_prefill=is_prefill,
        finish_reason=FinishReason.LENGTH if num_tokens == 4 else None,
    )


def step(result: RoundResult, *, num_prompt_tokens: int = 0) -> StepResult:
    return StepResult(rounds=[result], num_prompt_tokens=num_prompt_tokens, num_verify_tokens=1)


def test_a_step_of_several_tokens_is_not_one_token() -> None:
    """UC-149: 10 ms a step, 1, 3 and 4 tokens: a token takes 30 ms / 8, a step 10 ms."""
    tally = Tally()
    tally.add(step(a_round(1, num_planned=0, is_prefill=True), num_prompt_tokens=9), 0.010, {})
    for num_tokens in (1, 3, 4):
        tally.add(step(a_round(num_tokens, num_planned=5)), 0.010, {"a": "math"})
    found = tally.measured()
    assert found.per_user_tokens_per_s == pytest.approx(8 / 0.030)
    assert found.step_s == pytest.approx(0.010)
    assert found.tokens_per_s == pytest.approx(9 / 0.040)
    assert found.prompt_tokens == 9


def test_no_rate_exceeds_a_whole_block_every_step() -> None:
    """UC-150, UC-152: tokens/s <= (K + 1) / step."""
    tally = Tally()
    for _ in range(5):
        tally.add(step(a_round(6, num_planned=5)), 0.010, {"a": "chat"})
    assert tally.measured().per_user_tokens_per_s <= (5 + 1) / 0.010 * (1 + 1e-9)
    assert tally.measured().counts.tau == 6
