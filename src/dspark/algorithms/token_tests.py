"""Do sampled tokens follow the same distribution as others, or the one that is stated for them?

Tests with a stated rate of false alarms, for `dspark audit`. It knows tokens as any hashable
values, no server and no text.

    two_sample       permutation test: labels of the samples of a prompt are exchanged, so its
                     p-value is exact whatever the distributions are
    goodness_of_fit  Pearson's chi-square against stated probabilities, summed over contexts that
                     came often
    uniformity       the same for the places of all tokens in the distributions stated for them
    holm             which of several tests fail at one family-wise rate (Holm 1979)
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1000  # permutations in memory at once
_LEAST_COUNT = 10  # samples of both sides in a cell of its own
_NUM_BINS = 20
_LEAST_EXPECTED = 10.0  # the same for stated probabilities: below, the chi-square tail is too thin

Answer = Sequence[Hashable]
"""The first tokens of one sampled answer; a shorter one has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a test found; a small p-value speaks against equality."""

    statistic: float
    p_value: float
    num_cells: int
    """Counts that were compared; 0: nothing could be, and the p-value is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePair:
    """Independent answers to one prompt from two sources."""

    left: Sequence[Answer]
    right: Sequence[Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What followed one prefix, beside the probabilities stated for it."""

    counts: Mapping[Hashable, int]
    probs: Mapping[Hashable, float]
    is_complete: bool
    """Whether `probs` hold every possible token; otherwise what they leave belongs to the rest."""

    @property
    def num_impossible(self) -> int:
        """Tokens seen that were stated to be impossible."""
        if not self.is_complete:
            return 0
        return sum(n for token, n in self.counts.items() if self.probs.get(token, 0.0) <= 0.0)


def two_sample(
    pairs: Sequence[SamplePair], *, num_tokens: int, seed: int, permutations: int
) -> Finding:
    """Whether left and right answers have one joint distribution of their first `num_tokens`.

    The statistic is the sum of G over all prompts and tables: one for each pair of neighbouring
    positions, one for the number of different tokens. Rare values share a cell. Prompts are
    permuted on their own.
    """
    generator = torch.Generator().manual_seed(seed)
    observed, num_cells = 0.0, 0
    permuted_B = torch.zeros(permutations, dtype=torch.float64)
    for pair in pairs:
        cells_NC, num_tables = _cells([*pair.left, *pair.right], num_tokens)
        if num_tables == 0:
            continue
        num_cells += cells_NC.shape[1]
        labels_1N = torch.zeros((1, len(cells_NC)), dtype=torch.float32)
        labels_1N[0, : len(pair.left)] = 1.0
        observed += float(_g_terms(labels_1N, cells_NC, num_tables)[0])
        for start in range(0, permutations, _CHUNK):
            rows = slice(start, min(start + _CHUNK, permutations))
            labels_BN = _permuted(labels_1N, rows.stop - start, generator)
            permuted_B[rows] += _g_terms(labels_BN, cells_NC, num_tables)
    # equal statistics are equal up to the order of their sums
    num_as_large = int((permuted_B >= observed - 1e-6 * max(1.0, abs(observed))).sum())
    return Finding(
        statistic=observed,
        p_value=(1 + num_as_large) / (permutations + 1),
        num_cells=num_cells,
    )


def goodness_of_fit(contexts: Sequence[Context]) -> Finding:
    """Whether the tokens behind each prefix follow the probabilities stated there.

    Given how often a prefix came, its next tokens are one multinomial draw, independent of those
    behind other prefixes, so their chi-squares add up. An impossible token gives p-value 0.
    """
    statistic, freedom, num_cells = 0.0, 0, 0
    for context in contexts:
        cells = list(_expected_cells(context))
        if len(cells) < 2:
            continue
        statistic += sum((seen - expected) ** 2 / expected for seen, expected in cells)
        freedom += len(cells) - 1
        num_cells += len(cells)
    is_possible = not any(context.num_impossible for context in contexts)
    return Finding(
        statistic=statistic,
        p_value=chi_square_tail(statistic, freedom) if is_possible else 0.0,
        num_cells=num_cells,
    )


def place(token: Hashable, probs: Mapping[Hashable, float], chance: float) -> float:
    """Where a token lies in its stated distribution, the likeliest first: in [0, 1].

    For `chance` uniform in [0, 1) and a token drawn as stated it is uniform too, whatever the
    distribution and the tokens before (Rosenblatt 1952), so that places of different prefixes may
    be counted together. A token that is not listed lies in what the listed ones leave.
    """
    low = 0.0
    for other, p in sorted(probs.items(), key=lambda item: -item[1]):
        if other == token:
            return min(low + chance * p, 1.0)
        low += p
    return min(low + chance * max(1.0 - low, 0.0), 1.0)


def uniformity(places: Sequence[float]) -> Finding:
    """Whether places are spread evenly: chi-square over equal bins."""
    num_bins = min(_NUM_BINS, int(len(places) / _LEAST_EXPECTED))
    if num_bins < 2:
        return Finding(statistic=0.0, p_value=1.0, num_cells=0)
    counts = Counter(min(int(value * num_bins), num_bins - 1) for value in places)
    expected = len(places) / num_bins
    statistic = sum((counts[i] - expected) ** 2 / expected for i in range(num_bins))
    return Finding(
        statistic=statistic, p_value=chi_square_tail(statistic, num_bins - 1), num_cells=num_bins
    )


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees >= statistic); 1 without any degree of freedom."""
    if freedom == 0:
        return 1.0
    halves = torch.tensor([freedom / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def holm(p_values: Sequence[float], *, rate: float) -> list[bool]:
    """Whether each test is rejected, so that one or more false alarms have at most this chance."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > rate / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def _cells(answers: Sequence[Answer], num_tokens: int) -> tuple[Tensor, int]:
    """One-hot columns float32 [N, C] of all tables side by side, and how many tables."""
    columns: list[Tensor] = []
    num_tables = 0
    for values in _features(answers, num_tokens):
        counts = Counter(values)
        own = [value for value, n in counts.items() if n >= _LEAST_COUNT]
        place = {value: i for i, value in enumerate(own)}
        column_N = torch.tensor([place.get(value, len(own)) for value in values])
        size = len(own) + (len(own) < len(counts))
        if size > 1:
            columns.append(torch.nn.functional.one_hot(column_N, size).float())
            num_tables += 1
    return (torch.cat(columns, 1), num_tables) if columns else (torch.empty(0, 0), 0)


def _features(answers: Sequence[Answer], num_tokens: int) -> Iterator[list[Hashable]]:
    """Each pair of neighbours, and how often tokens repeat: of what was tried, these showed the
    planted faults with the fewest samples. Whole prefixes scatter over too many cells."""
    for start in range(num_tokens - 1):
        yield [tuple(answer[start : start + 2]) for answer in answers]
    yield [len(set(answer[:num_tokens])) for answer in answers]


def _permuted(labels_1N: Tensor, count: int, generator: torch.Generator) -> Tensor:
    order_BN = torch.rand((count, labels_1N.shape[1]), generator=generator).argsort(1)
    return labels_1N[0][order_BN]


def _g_terms(labels_BN: Tensor, cells_NC: Tensor, num_tables: int) -> Tensor:
    """Sum of the tables' G for each labelling, float64 [B]."""
    left_BC = (labels_BN @ cells_NC).double()
    total_C = cells_NC.sum(0).double()
    right_BC = total_C - left_BC
    num_left, num_all = labels_BN[0].sum().double(), float(labels_BN.shape[1])
    within_B = (torch.xlogy(left_BC, left_BC) + torch.xlogy(right_BC, right_BC)).sum(1)
    num_right = num_all - num_left
    sides = torch.xlogy(num_left, num_left) + torch.xlogy(num_right, num_right)
    whole = torch.xlogy(torch.tensor(num_all), torch.tensor(num_all)).double()
    return 2.0 * (within_B - torch.xlogy(total_C, total_C).sum() + num_tables * (whole - sides))


def _expected_cells(context: Context) -> Iterator[tuple[int, float]]:
    """Counts and expected counts; cells that are too rare are put together."""
    total = sum(context.counts.values())
    cells = sorted(
        ((context.counts.get(token, 0), total * p) for token, p in context.probs.items()),
        key=lambda cell: -cell[1],
    )
    own = [cell for cell in cells if cell[1] >= _LEAST_EXPECTED]
    seen, expected = total - sum(n for n, _ in own), total - sum(e for _, e in own)
    if expected < _LEAST_EXPECTED and own:
        last_seen, last_expected = own.pop()
        seen, expected = seen + last_seen, expected + last_expected
    yield from own
    if expected > 0.0:
        yield seen, expected
