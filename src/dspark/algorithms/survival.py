"""Survival of drafted tokens, accepted length, and per-position statistics of rounds.
It knows confidences and counts; it knows neither the prefix scheduler nor wall-clock.

Definitions (method sections 1 and 8). Positions k = 1..K count drafted tokens of a round;
tau includes the target's own token. A token that was not verified is never a rejection.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dspark.core import RoundResult


def survival(confidence_RK: Tensor) -> Tensor:
    """a_k = c_1 ... c_k from the logits of c_k: float32 [R, K], falling along k."""
    return torch.sigmoid(confidence_RK.to(torch.float32)).cumprod(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceStats:
    """Counts over rounds. They add up: `a + b` is the statistics of both sets of rounds.

    Entry k-1 of a tuple belongs to position k; tuples may be shorter than K.
    """

    num_rounds: int = 0
    num_committed: int = 0
    num_offered: int = 0
    num_planned: int = 0
    num_accepted: int = 0
    verified_at: tuple[int, ...] = ()
    """Rounds in which position k was verified and not cut off by the end of the answer."""
    reached_at: tuple[int, ...] = ()
    """Those of them in which positions 1..k-1 were accepted."""
    accepted_at: tuple[int, ...] = ()
    """Rounds in which position k was accepted."""

    @classmethod
    def of_round(
        cls, *, num_offered: int, num_planned: int, num_accepted: int, num_committed: int
    ) -> "AcceptanceStats":
        """One round. With no token of the target's own (`num_committed == num_accepted`) the
        answer ended inside the window, and positions after the end tell nothing."""
        assert 0 <= num_accepted <= num_planned <= num_offered, "accepted <= planned <= offered"
        is_cut = num_committed == num_accepted
        num_verified = num_accepted if is_cut else num_planned
        num_reached = min(num_accepted + 1, num_verified)
        return cls(
            num_rounds=1,
            num_committed=num_committed,
            num_offered=num_offered,
            num_planned=num_planned,
            num_accepted=num_accepted,
            verified_at=(1,) * num_verified,
            reached_at=(1,) * num_reached,
            accepted_at=(1,) * num_accepted,
        )

    @classmethod
    def of(cls, rounds: Iterable[RoundResult]) -> "AcceptanceStats":
        """The statistics of `rounds`; an answer's first token, the prompt's own, left out."""
        total = cls()
        for item in rounds:
            if not item.is_prefill:
                total += cls.of_round(
                    num_offered=item.num_offered,
                    num_planned=item.num_planned,
                    num_accepted=item.num_accepted,
                    num_committed=len(item.token_ids),
                )
        return total

    def __add__(self, other: "AcceptanceStats") -> "AcceptanceStats":
        return AcceptanceStats(
            num_rounds=self.num_rounds + other.num_rounds,
            num_committed=self.num_committed + other.num_committed,
            num_offered=self.num_offered + other.num_offered,
            num_planned=self.num_planned + other.num_planned,
            num_accepted=self.num_accepted + other.num_accepted,
            verified_at=_sums(self.verified_at, other.verified_at),
            reached_at=_sums(self.reached_at, other.reached_at),
            accepted_at=_sums(self.accepted_at, other.accepted_at),
        )

    @property
    def tau(self) -> float | None:
        """Tokens committed per round, the target's own included; `None` without rounds.

        Of a sum of requests this is the mean weighted by rounds; see also `mean_tau`.
        """
        return _ratio(self.num_committed, self.num_rounds)

    @property
    def accepted_per_round(self) -> float | None:
        """Drafted tokens committed per round: says whether a falling ratio is a loss (UC-148)."""
        return _ratio(self.num_accepted, self.num_rounds)

    @property
    def acceptance_planned(self) -> float | None:
        """Share of the verified drafted tokens that were committed."""
        return _ratio(self.num_accepted, self.num_planned)

    @property
    def acceptance_offered(self) -> float | None:
        """Share of all drafted tokens that were committed."""
        return _ratio(self.num_accepted, self.num_offered)

    @property
    def conditional_acceptance(self) -> tuple[float | None, ...]:
        """Position k's share accepted among rounds that accepted 1..k-1 and verified k."""
        return _ratios(self.accepted_at, self.reached_at)

    @property
    def position_acceptance(self) -> tuple[float | None, ...]:
        """Position k's share accepted among all rounds that verified k: measured survival."""
        return _ratios(self.accepted_at, self.verified_at)


def mean_tau(requests: Iterable[AcceptanceStats]) -> float | None:
    """Mean of the requests' own tau, each request weighing the same (UC-147)."""
    taus = [stats.tau for stats in requests if stats.tau is not None]
    return sum(taus) / len(taus) if taus else None


def _sums(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _ratios(parts: tuple[int, ...], wholes: tuple[int, ...]) -> tuple[float | None, ...]:
    return tuple(_ratio(a, b) for a, b in zip_longest(parts, wholes, fillvalue=0))
