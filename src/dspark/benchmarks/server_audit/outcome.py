"""What an audit reports: tests, differences, and what could not be tested."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One test."""

    name: str
    statistic: float
    p_value: float | None
    """`None` for a test without chance."""
    passed: bool
    detail: str
    """What was compared, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where a greedy answer leaves plain decoding."""

    prompt: int
    """Counted from 0."""
    position: int
    """First answer token that differs, counted from 0."""
    top2_gap: float | None
    """By how much plain decoding's token is likelier (natural logs); `None` where not stated."""
    noise: float
    """Largest gap that arithmetic explains here, as measured."""
    explained: bool
    profile: str
    tokens: Sequence[str | None]
    """Plain decoding's token and the other one; `None` where the answer has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untested:
    """What could not be tested, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The verdict and its grounds."""

    url: str
    model: str
    reference: str | None
    """Whose answers count as plain: `the same server without drafts`, a URL, or nobody's."""
    temperature: float
    false_alarm: float
    tests: Sequence[Outcome]
    untested: Sequence[Untested]
    divergences: Sequence[Divergence]
    num_sampled_drafted: int | None
    """Drafted tokens of the sampled answers; `None` where there are none, or it is not told."""
    num_drafted: int | None
    """Drafted tokens of the greedy answers; `None` where the server does not tell."""

    @property
    def lossless(self) -> bool:
        """Whether every test passed, there was one, and something was drafted (UC-015)."""
        return bool(self.tests) and all(test.passed for test in self.tests) and self.has_drafts

    @property
    def has_drafts(self) -> bool:
        """Whether the greedy answers held drafts, as far as the server tells."""
        return self.num_drafted != 0

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""
        return {"lossless": self.lossless, **asdict(self)}
