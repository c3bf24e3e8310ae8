"""StepCost: seconds of one step by its size, as a table of what was measured on this machine.
It knows requests, tokens and context positions; it takes no time itself and reads no file.

    T(R, B, C) = draft(D, C) + verify(R, B, C)

    draft     the drafter's part for D requests, absent from a step that drafts nothing
    verify    everything else of a step: one pass over B target tokens (anchors and drafts) of R
              requests, acceptance, commit; a curve over B for each measured R. Tokens of prompts
              have no logits: they cost what a step grows by them in the first row, whose larger
              sizes were measured with one request that decodes beside a prompt
    context   C positions that the requests hold together. Curves belong to `context` positions a
              request; what differs costs `held` for each position (its keys and values are read
              once a request) and `attended` for each (token, position) pair
    sampled   what is more where tokens are drawn, not looked up: both parts are those of greedy
              requests, of a mixed batch the sampled ones' share of this comes on top

A table without the last one, another engine's say, takes all requests for alike.
Letters: B budgets 0, 1, .. of drafted tokens.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dspark.algorithms.cost_curve import CostCurve
from dspark.algorithms.fingerprint import Fingerprint
from dspark.algorithms.prefix_scheduler import Prices
from dspark.algorithms.ranking import Floats, Ints
from dspark.errors import ModelError

# A correction for a short context never takes more than this share of a measured time away.
_MOST_SAVED = 0.75
_VERSION = 2
"""Of the format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """Seconds by target tokens for one number of requests."""

    num_requests: int
    curve: CostCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCost:
    """Seconds that positions add beyond those of the profile; see the top."""

    held: float = 0.0
    attended: float = 0.0
    draft_held: float = 0.0
    """`held`, for the drafter's own part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledCost:
    """Seconds beyond those of greedy requests for as many that are sampled."""

    draft: CostCurve
    """By the number of requests that draft."""
    verify: tuple[VerifyRow, ...]
    """By rows of logits: anchors and drafts, no prompts. A few sizes are enough: it is work on
    single rows, without shelves."""

    def __post_init__(self) -> None:
        _require_rising(self.verify)

    def scaled(self, draft: float, verify: float) -> "SampledCost":
        """Both parts times a factor."""
        rows = [
            VerifyRow(num_requests=row.num_requests, curve=_times(row.curve, verify))
            for row in self.verify
        ]
        return SampledCost(draft=_times(self.draft, draft), verify=tuple(rows))

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {"draft": self.draft.to_json(), "verify": _rows_to_json(self.verify)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises `ModelError` for curves that `to_json` cannot have written."""
        return cls(draft=CostCurve.from_json(data["draft"]), verify=_rows_from_json(data["verify"]))


class Entry(NamedTuple):
    """Seconds of one part of one step at the positions of the profile, as plain numbers."""

    greedy: float
    more: float
    """What comes on top if all its requests are sampled."""

    def with_extra(self, extra: float, sampled: float) -> float:
        """With what other positions add, and for this share of sampled requests."""
        least = (1.0 - _MOST_SAVED) * self.greedy
        return max(self.greedy + extra, least) + sampled * self.more


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The table. Frozen: live measurements make a new one (`live_cost.merged`)."""

    fingerprint: Fingerprint
    block_size: int
    context: int
    """Positions of each request while the curves were measured."""
    draft: CostCurve
    """By the number of requests that draft."""
    verify: tuple[VerifyRow, ...]
    """By rising number of requests; in between, the rows on both sides are mixed."""
    context_cost: ContextCost = ContextCost()
    sampled: SampledCost | None = None
    """`None`: sampled requests cost what greedy ones do."""

    def __post_init__(self) -> None:
        _require_rising(self.verify)

    def draft_seconds(
        self, drafting_N: Ints, context_N: Ints, *, sampled: float | Floats = 0.0
    ) -> Floats:
        """The drafter's part for so many requests that hold `context_N` positions: [N].

        `sampled`: the share of them that are, here as everywhere.
        """
        measured_N = np.where(drafting_N > 0, self.draft.at(drafting_N), 0.0)
        extra_N = self.context_cost.draft_held * (context_N - drafting_N * self.context)
        greedy_N = _corrected(measured_N, extra_N)
        if not np.any(sampled):
            return greedy_N
        return greedy_N + sampled * self.sampled_draft_seconds(drafting_N)

    def verify_seconds(
        self,
        num_requests: int,
        tokens_N: Ints,
        context_N: Ints,
        *,
        sampled: float | Floats = 0.0,
        num_prompt_tokens: int = 0,
    ) -> Floats:
        """The rest of a step of these requests, by target tokens and positions held: [N].

        `num_prompt_tokens` of the tokens are those of prompts.
        """
        decoding_N = tokens_N - num_prompt_tokens
        measured_N = _mixed(self.verify, num_requests, decoding_N)
        if num_prompt_tokens:
            beside = self.verify[0].curve
            measured_N = measured_N + np.maximum(beside.at(tokens_N) - beside.at(decoding_N), 0.0)
        more_N = context_N / max(num_requests, 1) - self.context
        extra_N = more_N * (
            self.context_cost.held * num_requests + self.context_cost.attended * tokens_N
        )
        greedy_N = _corrected(measured_N, extra_N)
        if not np.any(sampled):
            return greedy_N
        return greedy_N + sampled * self.sampled_seconds(num_requests, decoding_N)

    def sampled_draft_seconds(self, drafting_N: Ints) -> Floats:
        """What the drafter's part takes more if all that draft are sampled: [N]."""
        if self.sampled is None:
            return np.zeros(len(drafting_N))
        return np.where(drafting_N > 0, self.sampled.draft.at(drafting_N), 0.0)

    def sampled_seconds(self, num_requests: int, rows_N: Ints) -> Floats:
        """What the rest takes more if all requests are sampled, by anchors and drafts: [N]."""
        if self.sampled is None:
            return np.zeros(len(rows_N))
        return _mixed(self.sampled.verify, num_requests, rows_N)

    def draft_entry(self, num_drafting: int) -> Entry:
        """What the table says of the drafter's part of one step."""
        drafting_1 = np.array([num_drafting])
        return Entry(
            greedy=float(self.draft_seconds(drafting_1, drafting_1 * self.context)[0]),
            more=float(self.sampled_draft_seconds(drafting_1)[0]),
        )

    def verify_entry(self, num_requests: int, num_tokens: int) -> Entry:
        """What the table says of the rest of one step, without prompts."""
        tokens_1, context_1 = np.array([num_tokens]), np.array([num_requests * self.context])
        return Entry(
            greedy=float(self.verify_seconds(num_requests, tokens_1, context_1)[0]),
            more=float(self.sampled_seconds(num_requests, tokens_1)[0]),
        )

    def draft_in_context(
        self, entry: Entry, num_drafting: int, context: int, *, sampled: float
    ) -> float:
        """`draft_seconds` of one step, from its entry."""
        extra = self.context_cost.draft_held * (context - num_drafting * self.context)
        return entry.with_extra(extra, sampled)

    def verify_in_context(
        self, entry: Entry, num_requests: int, num_tokens: int, context: int, *, sampled: float
    ) -> float:
        """`verify_seconds` of one step, from its entry."""
        costs, more = self.context_cost, context / max(num_requests, 1) - self.context
        extra = more * (costs.held * num_requests + costs.attended * num_tokens)
        return entry.with_extra(extra, sampled)

    def rows_around(self, num_requests: int) -> tuple[int, ...]:
        """Which rows of `verify` say what a step of so many requests costs: one, or two to mix, and
        the first one, which says what prompts do."""
        return tuple(sorted({0, *_rows_around(self.verify, num_requests)}))

    def prices(
        self,
        *,
        num_requests: int,
        num_drafting: int,
        num_prompt_tokens: int,
        num_certain: int,
        context: int,
        most: int,
        is_drafted: bool,
    ) -> Prices:
        """What every budget up to `most` costs in this step.

        `num_requests` decode, `num_drafting` of them with the drafter; `num_certain` tokens come
        without any draft; all that take part hold `context` positions. `is_drafted`: the block
        exists, so that not drafting is no choice any more.
        """
        first = num_requests + num_prompt_tokens
        tokens_B = first + np.arange(most + 1)
        seconds_B = self.verify_seconds(
            num_requests, tokens_B, np.array([context]), num_prompt_tokens=num_prompt_tokens
        )
        drafting = np.array([num_drafting])
        draft_1 = self.draft_seconds(drafting, context * drafting // max(num_requests, 1))
        return Prices(
            seconds_B=seconds_B + draft_1,
            num_certain=num_certain,
            plain_seconds=None if is_drafted else float(seconds_B[0]),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            "version": _VERSION,
            "fingerprint": self.fingerprint.to_json(),
            "block_size": self.block_size,
            "context": self.context,
            "draft": self.draft.to_json(),
            "verify": _rows_to_json(self.verify),
            "context_cost": {
                "held": self.context_cost.held,
                "attended": self.context_cost.attended,
                "draft_held": self.context_cost.draft_held,
            },
            "sampled": None if self.sampled is None else self.sampled.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises `ModelError` for what `to_json` cannot have written."""
        try:
            if data["version"] != _VERSION:
                raise ModelError(
                    f"These step costs have version {data['version']!r}; run `dspark profile` "
                    "again."
                )
            return cls(
                fingerprint=Fingerprint.from_json(data["fingerprint"]),
                block_size=int(data["block_size"]),
                context=int(data["context"]),
                draft=CostCurve.from_json(data["draft"]),
                verify=_rows_from_json(data["verify"]),
                context_cost=ContextCost(
                    **{name: float(value) for name, value in data["context_cost"].items()}
                ),
                sampled=None if data["sampled"] is None else SampledCost.from_json(data["sampled"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"The step costs cannot be read ({error}); run `dspark profile` again."
            ) from error


def median_cost(costs: Sequence[StepCost]) -> StepCost:
    """Medians of tables of the same sizes, entry by entry: corrections of one profile for instance.
    What sampled requests cost more, and contexts, are those of the first."""
    first = costs[0]
    return replace(
        first,
        draft=_median_curve([cost.draft for cost in costs]),
        verify=tuple(
            replace(row, curve=_median_curve([cost.verify[i].curve for cost in costs]))
            for i, row in enumerate(first.verify)
        ),
    )


def _median_curve(curves: Sequence[CostCurve]) -> CostCurve:
    seconds_E = np.median([curve.seconds for curve in curves], axis=0)
    return replace(curves[0], seconds=tuple(seconds_E.tolist()))


def _corrected(measured_N: Floats, extra_N: npt.NDArray[np.floating[Any]]) -> Floats:
    seconds_N: Floats = np.maximum(measured_N + extra_N, (1.0 - _MOST_SAVED) * measured_N)
    return seconds_N


def _require_rising(rows: Sequence[VerifyRow]) -> None:
    numbers = [row.num_requests for row in rows]
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise ModelError(f"The rows of a step cost must have rising requests, not {numbers}.")


def _rows_around(rows: Sequence[VerifyRow], num_requests: int) -> tuple[int, ...]:
    numbers = [row.num_requests for row in rows]
    above = bisect_left(numbers, num_requests)
    if above < len(numbers) and (above == 0 or numbers[above] == num_requests):
        return (above,)
    if len(numbers) == 1:
        return (0,)
    high = min(above, len(numbers) - 1)
    return high - 1, high


def _mixed(rows: Sequence[VerifyRow], num_requests: int, tokens_N: Ints) -> Floats:
    """The rows on both sides mixed, or the last two carried on beyond the last."""
    around = [rows[i] for i in _rows_around(rows, num_requests)]
    if len(around) == 1:
        return around[0].curve.at(tokens_N)
    low, high = around
    low_N, high_N = low.curve.at(tokens_N), high.curve.at(tokens_N)
    share = (num_requests - low.num_requests) / (high.num_requests - low.num_requests)
    if share > 1.0:  # more requests than were measured never make the step quicker
        return high_N + (share - 1.0) * np.maximum(high_N - low_N, 0.0)
    mixed_N: Floats = (1.0 - share) * low_N + share * high_N
    return mixed_N


def _times(curve: CostCurve, factor: float) -> CostCurve:
    return curve.scaled([factor] * len(curve.sizes))


def _rows_to_json(rows: Sequence[VerifyRow]) -> list[dict[str, Any]]:
    return [{"num_requests": row.num_requests, "curve": row.curve.to_json()} for row in rows]


def _rows_from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[VerifyRow, ...]:
    return tuple(
        VerifyRow(num_requests=int(row["num_requests"]), curve=CostCurve.from_json(row["curve"]))
        for row in rows
    )
