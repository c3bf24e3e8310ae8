"""The pair counts of a text as a sequential head."""

import torch

from dspark.algorithms.token_pairs import SMOOTHING, pair_bias

V, S = 30, 20


def pairs(num: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """A text where column 3 t + 1 follows token t half of the time."""
    generator = torch.Generator().manual_seed(3)
    previous_N = torch.randint(1, V, (num,), generator=generator)
    follows_N = torch.rand(num, generator=generator) < 0.5
    column_N = torch.randint(0, S, (num,), generator=generator)
    return previous_N, torch.where(follows_N, (3 * previous_N + 1) % S, column_N)


def test_at_full_rank_it_turns_frequencies_into_smoothed_ones_after_each_token() -> None:
    previous_N, column_N = pairs()
    w1_Vr, w2_Sr = pair_bias(previous_N, column_N, vocab_size=V, draft_vocab_size=S, rank=S)
    frequency_S = torch.bincount(column_N, minlength=S).double() + 0.5
    frequency_S /= frequency_S.sum()
    count_VS = torch.zeros(V, S, dtype=torch.float64)
    count_VS.index_put_((previous_N, column_N), torch.ones(len(column_N)).double(), accumulate=True)
    expected_VS = count_VS + SMOOTHING * frequency_S
    expected_VS /= expected_VS.sum(dim=1, keepdim=True)
    found_VS = (frequency_S.log() + (w1_Vr @ w2_Sr.T).double()).softmax(dim=1)
    torch.testing.assert_close(found_VS, expected_VS, atol=1e-5, rtol=1e-4)


def test_a_small_rank_predicts_most_of_what_the_whole_table_does() -> None:
    """Of a text that is a mixture of three habits, rank 3 is enough."""
    generator = torch.Generator().manual_seed(4)
    habits_3S = torch.rand(3, S, generator=generator).pow(6)
    previous_N = torch.randint(0, V, (20000,), generator=generator)
    column_N = torch.multinomial(habits_3S[previous_N % 3], 1, generator=generator)[:, 0]
    frequency_S = (torch.bincount(column_N, minlength=S) + 0.5).log()

    def loss(rank: int) -> float:
        w1_Vr, w2_Sr = pair_bias(previous_N, column_N, vocab_size=V, draft_vocab_size=S, rank=rank)
        logits_NS = frequency_S + (w1_Vr @ w2_Sr.T)[previous_N]
        return float(torch.nn.functional.cross_entropy(logits_NS, column_N))

    without = float(torch.nn.functional.cross_entropy(frequency_S.expand(20000, S), column_N))
    assert without - loss(3) > 0.95 * (without - loss(S)) > 0.1


def test_the_factors_are_of_one_size_repeat_and_leave_uncounted_tokens_at_zero() -> None:
    previous_N, column_N = pairs()
    w1_Vr, w2_Sr = pair_bias(previous_N, column_N, vocab_size=V, draft_vocab_size=S, rank=6)
    again = pair_bias(previous_N, column_N, vocab_size=V, draft_vocab_size=S, rank=6)
    assert torch.equal(w1_Vr, again[0])
    assert torch.equal(w2_Sr, again[1])
    assert not w1_Vr[0].any()  # no pair begins with token 0
    sizes = [x.square().mean().sqrt() for x in (w1_Vr[previous_N], w2_Sr)]
    torch.testing.assert_close(sizes[0], sizes[1])


def test_a_rank_beyond_the_matrix_is_filled_with_zeros() -> None:
    previous_N, column_N = pairs()
    w1_Vr, w2_Sr = pair_bias(previous_N, column_N, vocab_size=V, draft_vocab_size=S, rank=S + 5)
    assert w1_Vr.shape == (V, S + 5)
    assert w2_Sr.shape == (S, S + 5)
    assert not w1_Vr[:, S:].any()
