"""The counter-based hash: its exact values, its independence of the batch, its quality."""

import math

import pytest
import torch

from dspark.algorithms.noise import Stream, gumbel, random_bits, round_seeds, row_keys, uniform
from tests.algorithms.toy_distributions import chi_square_p_value

U64 = 2**64 - 1
U32 = 2**32 - 1


def reference_key(seed: int, position: int, stream: int) -> int:
    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & U64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    return mix((mix((seed + golden * stream) & U64) + golden * (position + 1)) & U64)


def reference_bits(key: int, token: int) -> int:
    low, high = key & U32, key >> 32
    x = (token + low) & U32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & U32
    x = (((x ^ (x >> 15)) + high) * 0x846CA68B) & U32
    return x ^ (x >> 16)


def keys(seed: int | list[int], position: int | list[int], stream: Stream = Stream.TOKEN):
    seed, position = torch.as_tensor(seed), torch.as_tensor(position)
    return row_keys(*torch.broadcast_tensors(seed.reshape(-1), position.reshape(-1)), stream)


def test_bits_equal_the_documented_function_computed_with_python_integers():
    seeds = [0, 1, 7, 2**31, 2**63 - 1]
    positions = [0, 1, 5, 131_071, 2**40]
    tokens = [0, 1, 2, 49_151, 262_143, 2**31 - 1]
    for stream in Stream:
        key_R = keys(seeds, positions, stream)
        bits_RS = random_bits(key_R, torch.tensor(tokens)).to(torch.int64) & U32
        for r, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
            key = reference_key(seed, position, stream)
            assert int(key_R[r]) & U64 == key
            assert bits_RS[r].tolist() == [reference_bits(key, token) for token in tokens]


def test_a_golden_row_of_bits_never_changes():
    """A changed hash would change the text of every seeded request."""
    bits_RS = random_bits(keys(42, 10), torch.arange(4)).to(torch.int64) & U32
    assert bits_RS.tolist() == [[4053195393, 241912057, 2272769588, 6740260]]


def test_uniform_is_open_and_gumbel_is_finite_at_both_ends():
    lowest = (-(2**31) + 2147483648.5) * 2.0**-32
    highest = (2**31 - 1 + 2147483648.5) * 2.0**-32
    assert 0.0 < lowest < highest < 1.0
    assert -math.log(-math.log(lowest)) == pytest.approx(-3.1305, abs=1e-3)
    assert -math.log(-math.log(highest)) == pytest.approx(22.8739, abs=1e-3)
    u_RS = uniform(keys(3, 4), torch.arange(2_000_000))
    assert u_RS.dtype == torch.float64
    assert 0.0 < float(u_RS.min()) < 1e-5
    assert 1 - 1e-5 < float(u_RS.max()) < 1.0


def test_noise_does_not_depend_on_batch_mates_or_on_the_other_tokens():
    tokens_S = torch.arange(1000)
    key_R = keys([5, 5, 9], [1, 2, 1])
    whole_RS = gumbel(key_R, tokens_S)
    for r in range(3):
        assert torch.equal(gumbel(key_R[r : r + 1], tokens_S)[0], whole_RS[r])
        assert torch.equal(gumbel(key_R[r : r + 1], tokens_S[17:23])[0], whole_RS[r, 17:23])
    own_RS = torch.tensor([[3, 1], [999, 0], [7, 7]])
    assert torch.equal(gumbel(key_R, own_RS), whole_RS.gather(1, own_RS))


def test_arguments_are_not_changed():
    seed_R, position_R, tokens_S = torch.tensor([1]), torch.tensor([2]), torch.arange(9).int()
    key_R = row_keys(seed_R, position_R, Stream.TOKEN)
    before = key_R.clone()
    gumbel(key_R, tokens_S)
    assert torch.equal(key_R, before)
    assert torch.equal(tokens_S, torch.arange(9).int())
    assert (seed_R.item(), position_R.item()) == (1, 2)


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "streams of positions"])
def test_each_axis_is_uniform(axis: str):
    count = 400_000
    match axis:
        case "tokens":
            u = uniform(keys(1, 2), torch.arange(count))
        case "positions":
            u = uniform(keys(1, list(range(count))))
        case "seeds":
            u = uniform(keys(list(range(count)), 7))
        case _:
            u = uniform(keys(1, list(range(count)), Stream.ACCEPT))
    for cells in (16, 256, 1000):
        counts = torch.bincount((u.flatten() * cells).long(), minlength=cells)
        p = chi_square_p_value(counts, torch.full((cells,), count / cells))
        assert 1e-4 < p < 1 - 1e-4, (cells, p)


@pytest.mark.parametrize("other", ["token", "position", "seed", "stream", "token of next position"])
def test_neighbours_are_independent(other: str):
    """Pairs fill a 32 x 32 grid evenly: stronger than a vanishing linear correlation."""
    seeds, positions = torch.arange(200), torch.arange(200, 210)
    tokens_S = torch.arange(200)
    seed_R, position_R = (
        grid.flatten() for grid in torch.meshgrid(seeds, positions, indexing="ij")
    )

    def draw(seed_R: torch.Tensor, position_R: torch.Tensor, stream: Stream) -> torch.Tensor:
        return uniform(row_keys(seed_R, position_R, stream), tokens_S)

    base = draw(seed_R, position_R, Stream.TOKEN)
    # No number serves in two pairs, hence the even and odd members of an axis.
    match other:
        case "token":
            first, second = base[:, ::2], base[:, 1::2]
        case "position":
            first = draw(seed_R, 2 * position_R, Stream.TOKEN)
            second = draw(seed_R, 2 * position_R + 1, Stream.TOKEN)
        case "seed":
            first = draw(2 * seed_R, position_R, Stream.TOKEN)
            second = draw(2 * seed_R + 1, position_R, Stream.TOKEN)
        case "stream":
            first, second = base, draw(seed_R, position_R, Stream.DRAFT)
        case _:
            first = draw(seed_R, 2 * position_R, Stream.TOKEN)[:, :-1]
            second = draw(seed_R, 2 * position_R + 1, Stream.TOKEN)[:, 1:]
    cells = 32
    index = (first * cells).long() * cells + (second * cells).long()
    counts = torch.bincount(index.flatten(), minlength=cells * cells)
    expected = torch.full((cells * cells,), counts.sum().item() / cells**2)
    p = chi_square_p_value(counts, expected)
    assert 1e-4 < p < 1 - 1e-4
    centred = torch.stack([first.flatten() - 0.5, second.flatten() - 0.5])
    correlation = 12 * (centred[0] * centred[1]).mean()
    assert abs(float(correlation)) < 5 / math.sqrt(first.numel())


def test_each_output_bit_flips_half_the_time_when_one_input_bit_flips():
    seed_R = torch.arange(0, 400_000, 13)
    position_R = torch.arange(len(seed_R)) % 997
    tokens_R1 = (torch.arange(len(seed_R)) * 31 % 49_152)[:, None]
    base_R = random_bits(row_keys(seed_R, position_R, Stream.TOKEN), tokens_R1)[:, 0]
    for bit in range(16):
        for changed_R in (
            random_bits(row_keys(seed_R ^ (1 << bit), position_R, Stream.TOKEN), tokens_R1)[:, 0],
            random_bits(row_keys(seed_R, position_R ^ (1 << bit), Stream.TOKEN), tokens_R1)[:, 0],
            random_bits(row_keys(seed_R, position_R, Stream.TOKEN), tokens_R1 ^ (1 << bit))[:, 0],
        ):
            flips_RB = ((base_R ^ changed_R)[:, None] >> torch.arange(32)) & 1
            rate_B = flips_RB.double().mean(0)
            assert float((rate_B - 0.5).abs().max()) < 0.02, bit


def test_gumbel_argmax_draws_from_the_distribution():
    """The tail matters: a token of probability 1e-4 must win once in ten thousand."""
    probs = torch.tensor([0.6, 0.3, 0.09, 0.0099, 0.0001], dtype=torch.float64)
    count = 400_000
    winners = (probs.log() + gumbel(keys(11, list(range(count))), torch.arange(5))).argmax(-1)
    assert chi_square_p_value(torch.bincount(winners, minlength=5), probs * count) > 1e-3


def test_rounds_have_their_own_seeds():
    seeds = round_seeds(torch.full((1000,), 5), torch.arange(1000))
    assert len(set(seeds.tolist())) == 1000
    first, second = (
        uniform(row_keys(seeds[:-1], torch.full((999,), 3), Stream.DRAFT)),
        uniform(row_keys(seeds[1:], torch.full((999,), 3), Stream.DRAFT)),
    )
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.15
