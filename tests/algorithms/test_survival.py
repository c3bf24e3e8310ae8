"""Survival, expected accepted length, and the statistics whose definitions are a product."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.algorithms.survival import AcceptanceStats, mean_tau, survival
from dspark.core import Origin, RoundResult


def of_rounds(rounds: list[tuple[int, int]], *, offered: int = 4) -> AcceptanceStats:
    """Statistics of rounds given as (planned, accepted), the target's own token added to each."""
    total = AcceptanceStats()
    for planned, accepted in rounds:
        total += AcceptanceStats.of_round(
            num_offered=offered,
            num_planned=planned,
            num_accepted=accepted,
            num_committed=accepted + 1,
        )
    return total


def test_survival_multiplies_the_confidences():
    c_RK = torch.tensor([[0.9, 0.5, 0.2], [1.0, 0.25, 0.5]])
    a_RK = survival(c_RK.logit())
    torch.testing.assert_close(a_RK, torch.tensor([[0.9, 0.45, 0.09], [1.0, 0.25, 0.125]]))


def test_survival_of_bf16_logits_is_float32():
    logits_RK = torch.full((1, 7), 3.0).bfloat16()
    a_RK = survival(logits_RK)
    assert a_RK.dtype == torch.float32
    torch.testing.assert_close(a_RK[0, 6], torch.tensor(3.0).sigmoid() ** 7)


def test_the_documented_trace():
    """UC-147: rounds that accept 0, 2 and 4 of 4."""
    stats = of_rounds([(4, 0), (4, 2), (4, 4)])
    assert stats.tau == 3.0
    assert stats.accepted_per_round == 2.0
    assert stats.acceptance_planned == stats.acceptance_offered == 6 / 12
    assert stats.position_acceptance == (2 / 3, 2 / 3, 1 / 3, 1 / 3)
    assert stats.conditional_acceptance == (2 / 3, 1.0, 1 / 2, 1.0)


def test_mean_over_requests_differs_from_the_mean_over_rounds():
    """UC-147: both are given."""
    long, short = of_rounds([(4, 0)] * 9), of_rounds([(4, 4)])
    assert (long + short).tau == pytest.approx(14 / 10)
    assert mean_tau([long, short]) == pytest.approx(3.0)
    assert mean_tau([AcceptanceStats()]) is None


def test_longer_less_certain_drafts_lower_the_ratio_and_nothing_else():
    """UC-148: the ratio falls from 1 to 1/3, tokens per round and conditional rates stay."""
    short, long = of_rounds([(1, 1), (1, 1)]), of_rounds([(3, 1), (3, 1)])
    assert short.acceptance_planned == 1.0
    assert long.acceptance_planned == 1 / 3
    assert short.accepted_per_round == long.accepted_per_round == 1.0
    assert short.tau == long.tau
    assert short.conditional_acceptance[0] == long.conditional_acceptance[0] == 1.0
    assert long.conditional_acceptance == (1.0, 0.0)


def test_a_trimmed_token_is_never_a_rejection():
    trimmed, whole = of_rounds([(1, 1)] * 5), of_rounds([(4, 2)])
    stats = trimmed + whole
    assert stats.conditional_acceptance == (1.0, 1.0, 0.0)
    assert stats.acceptance_planned == 7 / 9
    assert stats.acceptance_offered == 7 / 24


def test_positions_after_the_end_of_the_answer_tell_nothing():
    """UC-030: a stop token at the second of six accepted drafts counts two, rejects none."""
    stats = AcceptanceStats.of_round(num_offered=6, num_planned=6, num_accepted=2, num_committed=2)
    assert stats.num_accepted == 2
    assert stats.conditional_acceptance == (1.0, 1.0)
    assert stats.tau == 2.0


def test_plain_decoding_has_a_tau_of_one_and_no_acceptance():
    stats = of_rounds([(0, 0)] * 3, offered=0)
    assert stats.tau == 1.0
    assert stats.acceptance_planned is None
    assert stats.acceptance_offered is None
    assert stats.conditional_acceptance == ()


def test_rounds_of_the_engine_are_counted_and_the_prompts_own_token_is_not():
    def result(
        tokens: int, planned: int, accepted: int, *, is_prefill: bool = False
    ) -> RoundResult:
        return RoundResult(
            request_id="a",
            token_ids=[1] * tokens,
            origins=[Origin.PLAIN] * tokens,
            logprobs=None,
            num_offered=4,
            num_planned=planned,
            num_accepted=accepted,
            is_prefill=is_prefill,
            finish_reason=None,
        )

    stats = AcceptanceStats.of([result(1, 0, 0, is_prefill=True), result(3, 3, 2), result(1, 2, 0)])
    assert stats == of_rounds([(3, 2), (2, 0)])


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).map(lambda x: (max(x), min(x)))))
def test_conditional_rates_chain_into_the_counts(rounds: list[tuple[int, int]]):
    """Property: sums over positions give the totals; reached_k <= accepted_(k-1)."""
    stats = of_rounds(rounds, offered=7)
    assert sum(stats.accepted_at) == stats.num_accepted
    assert sum(stats.verified_at) == stats.num_planned
    assert stats.num_committed == stats.num_accepted + stats.num_rounds
    for before, reached in zip(stats.accepted_at, stats.reached_at[1:], strict=False):
        assert reached <= before
    for rate in stats.conditional_acceptance:
        assert rate is None or 0.0 <= rate <= 1.0
