"""How well confidences foretell acceptance: ECE, AUROC, Brier, reliability by position.

It knows logits and counts of verified rounds; it neither fits nor applies temperatures.

Letters: R rounds, K positions of a block, N observations at one position.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.algorithms.survival import survival
from dspark.core import RoundResult
from dspark.errors import InputError

NUM_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceRounds:
    """Rounds of one drafter with what their verification showed.

    A position is observed if it was verified and does not stand behind the end of the answer;
    every other one is censored, never a rejection (method section 6).
    """

    logits_RK: Tensor  # float32, logits of c_k
    verified_R: Tensor  # int64, positions 1..verified are observed
    accepted_R: Tensor  # int64

    def __post_init__(self) -> None:
        num_rounds = self.logits_RK.shape[0]
        assert self.verified_R.shape == self.accepted_R.shape == (num_rounds,)

    @classmethod
    def of(cls, rounds: Iterable[RoundResult]) -> "ConfidenceRounds | None":
        """The drafted rounds that carry confidences; `None` if there is none.

        Raises `InputError` for blocks of different sizes.
        """
        kept = [r for r in rounds if r.confidence_logits is not None and not r.is_prefill]
        sizes = {len(r.confidence_logits or ()) for r in kept}
        if len(sizes) > 1:
            raise InputError(
                f"These rounds have blocks of {sorted(sizes)} tokens; measure one drafter alone."
            )
        if not kept:
            return None
        return cls(
            logits_RK=torch.tensor([r.confidence_logits for r in kept], dtype=torch.float32),
            verified_R=torch.tensor([r.num_verified for r in kept]),
            accepted_R=torch.tensor([r.num_accepted for r in kept]),
        )

    @property
    def block_size(self) -> int:
        """K."""
        return self.logits_RK.shape[1]

    def survival_at(self, k: int) -> tuple[Tensor, Tensor]:
        """Position k = 1..K over the rounds that verified it: predicted a_k float64 [N], and
        whether 1..k were all accepted, bool [N]."""
        seen_R = self.verified_R >= k
        probs_N = survival(self.logits_RK[seen_R])[:, k - 1].double()
        return probs_N, self.accepted_R[seen_R] >= k


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Observations whose prediction lies in one bin."""

    low: float
    high: float
    mean_predicted: float
    share_accepted: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCalibration:
    """Quality of the predicted survival at position k; `auroc` is `None` with one class only."""

    k: int
    count: int
    ece: float
    ece_mass: float
    auroc: float | None
    brier: float
    mean_predicted: float
    share_accepted: float


def calibration_by_position(rounds: ConfidenceRounds) -> list[PositionCalibration]:
    """One entry for each position that was observed at all."""
    found = []
    for k in range(1, rounds.block_size + 1):
        probs_N, accepted_N = rounds.survival_at(k)
        if len(probs_N):
            found.append(_position(k, probs_N, accepted_N))
    return found


def _position(k: int, probs_N: Tensor, accepted_N: Tensor) -> PositionCalibration:
    return PositionCalibration(
        k=k,
        count=len(probs_N),
        ece=ece(probs_N, accepted_N),
        ece_mass=ece_mass(probs_N, accepted_N),
        auroc=auroc(probs_N, accepted_N),
        brier=brier(probs_N, accepted_N),
        mean_predicted=float(probs_N.mean()),
        share_accepted=float(accepted_N.double().mean()),
    )


def mean_ece(positions: Sequence[PositionCalibration]) -> float | None:
    """Mean ECE of the positions, each weighing as many observations as it has."""
    total = sum(p.count for p in positions)
    return sum(p.ece * p.count for p in positions) / total if total else None


def ece(probs_N: Tensor, accepted_N: Tensor, *, num_bins: int = NUM_BINS) -> float:
    """Expected calibration error over equal-width bins, each weighing its observations.

    A prediction on an edge belongs to the bin above it, 1.0 to the last one.
    """
    return _weighted_gap(probs_N, accepted_N, _width_bins(probs_N, num_bins))


def ece_mass(probs_N: Tensor, accepted_N: Tensor, *, num_bins: int = NUM_BINS) -> float:
    """The same over bins of equal counts: no sparse bin can hide an error, none is empty.

    Equal predictions are never parted, so the value does not depend on the order.
    """
    return _weighted_gap(probs_N, accepted_N, _mass_bins(probs_N, num_bins))


def brier(probs_N: Tensor, accepted_N: Tensor) -> float:
    """Mean squared distance of prediction and outcome."""
    return float((probs_N.double() - accepted_N.double()).square().mean())


def auroc(probs_N: Tensor, accepted_N: Tensor) -> float | None:
    """Chance that an accepted observation was predicted higher than a rejected one, ties half.

    Exact, by mean ranks; `None` if all or none were accepted.
    """
    num_accepted = int(accepted_N.sum())
    num_rejected = len(accepted_N) - num_accepted
    if num_accepted == 0 or num_rejected == 0:
        return None
    _, group_N, counts_G = torch.unique(probs_N, return_inverse=True, return_counts=True)
    last_rank_G = counts_G.cumsum(0).double()
    mean_rank_G = last_rank_G - (counts_G.double() - 1.0) / 2.0
    rank_sum = float(mean_rank_G[group_N][accepted_N].sum())
    return (rank_sum - num_accepted * (num_accepted + 1) / 2) / (num_accepted * num_rejected)


def reliability(
    probs_N: Tensor, accepted_N: Tensor, *, num_bins: int = NUM_BINS
) -> list[ReliabilityBin]:
    """The equal-width bins that hold something, from low to high: the picture of Figure 6."""
    bins_N = _width_bins(probs_N, num_bins)
    found = []
    for index in sorted(set(bins_N.tolist())):
        inside_N = bins_N == index
        found.append(
            ReliabilityBin(
                low=index / num_bins,
                high=(index + 1) / num_bins,
                mean_predicted=float(probs_N[inside_N].double().mean()),
                share_accepted=float(accepted_N[inside_N].double().mean()),
                count=int(inside_N.sum()),
            )
        )
    return found


def _weighted_gap(probs_N: Tensor, accepted_N: Tensor, bins_N: Tensor) -> float:
    gaps_B = torch.zeros(int(bins_N.max()) + 1, dtype=torch.float64)
    gaps_B.index_add_(0, bins_N, probs_N.double() - accepted_N.double())
    return float(gaps_B.abs().sum()) / len(probs_N)


def _width_bins(probs_N: Tensor, num_bins: int) -> Tensor:
    return (probs_N.double() * num_bins).long().clamp(0, num_bins - 1)


def _mass_bins(probs_N: Tensor, num_bins: int) -> Tensor:
    # a group of equal values goes where its middle observation would go
    _, group_N, counts_G = torch.unique(probs_N, return_inverse=True, return_counts=True)
    middle_G = counts_G.cumsum(0).double() - counts_G.double() / 2.0
    bins_N: Tensor = (middle_G * num_bins / len(probs_N)).long().clamp(max=num_bins - 1)[group_N]
    return bins_N
