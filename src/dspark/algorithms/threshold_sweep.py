"""What a confidence threshold would have kept: Figure 5, replayed on fully verified rounds.

It knows logits and counts; no request, no clock. A live threshold moves the anchors of later
rounds, a replay does not: it measures the threshold on the rounds that were there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dspark.algorithms.calibration_metrics import ConfidenceRounds

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdPoint:
    """Rounds that verify drafted tokens up to the first whose c_k lies below `threshold`."""

    threshold: float
    tau: float
    planned_per_round: float
    accepted_per_round: float
    acceptance_planned: float | None
    """`None` where nothing was planned."""


def sweep(
    rounds: ConfidenceRounds, *, thresholds: Sequence[float] = THRESHOLDS
) -> list[ThresholdPoint]:
    """One point for each threshold over the rounds whose whole block was verified.

    Whether position k is verified depends on c_1..c_k alone, which see tokens before k only, so
    the rule is lossless. A round in which the answer ended counts as cut, not as verified whole,
    and is left out: it says nothing of the positions behind. Empty without any whole round.
    """
    whole_R = rounds.verified_R == rounds.block_size
    confidence_RK = rounds.logits_RK[whole_R].sigmoid()
    accepted_R = rounds.accepted_R[whole_R]
    if len(accepted_R) == 0:
        return []
    points = []
    for threshold in thresholds:
        planned_R = (confidence_RK >= threshold).long().cumprod(1).sum(1)
        kept_R = accepted_R.minimum(planned_R)
        num_planned = int(planned_R.sum())
        points.append(
            ThresholdPoint(
                threshold=threshold,
                tau=1.0 + float(kept_R.double().mean()),
                planned_per_round=float(planned_R.double().mean()),
                accepted_per_round=float(kept_R.double().mean()),
                acceptance_planned=int(kept_R.sum()) / num_planned if num_planned else None,
            )
        )
    return points
