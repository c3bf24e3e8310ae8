"""What the steps of one measurement add up to. It runs nothing."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspark.core import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Sums over rounds; they add up."""

    rounds: int = 0
    drafting: int = 0
    """Rounds for which anything was drafted."""
    offered: int = 0
    planned: int = 0
    accepted: int = 0
    committed: int = 0

    @classmethod
    def of(cls, sums: Sequence[int]) -> "Counts":
        """One number for each field, in their order."""
        rounds, drafting, offered, planned, accepted, committed = sums
        return cls(
            rounds=rounds,
            drafting=drafting,
            offered=offered,
            planned=planned,
            accepted=accepted,
            committed=committed,
        )

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            rounds=self.rounds + other.rounds,
            drafting=self.drafting + other.drafting,
            offered=self.offered + other.offered,
            planned=self.planned + other.planned,
            accepted=self.accepted + other.accepted,
            committed=self.committed + other.committed,
        )

    @property
    def tau(self) -> float | None:
        """Tokens committed a round; `None` without rounds."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def budget_per_request(self) -> float | None:
        """Drafted tokens verified a round."""
        return self.planned / self.rounds if self.rounds else None

    @property
    def drafting_share(self) -> float | None:
        """Share of rounds that drafted."""
        return self.drafting / self.rounds if self.rounds else None

    @property
    def accepted_share(self) -> float | None:
        """Share of the committed tokens that were drafted."""
        return self.accepted / self.committed if self.committed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One unit: sums over the steps of its steady state."""

    seconds: float
    num_steps: int
    step_s: float
    """Median length of a step."""
    tokens: int
    """Committed tokens, first tokens of answers included."""
    prompt_tokens: int
    decoding_s: float
    """Seconds that requests spent decoding, all of them added up."""
    domains: Mapping[str, Counts]
    """Rounds by domain; a prompt's own pass is none."""
    ttft_s: Sequence[float] = ()
    """Of an open load: from arrival to the first token."""

    @property
    def counts(self) -> Counts:
        """The rounds of all domains."""
        return sum(self.domains.values(), Counts())

    @property
    def tokens_per_s(self) -> float:
        """Of all users together."""
        return self.tokens / self.seconds

    @property
    def per_user_tokens_per_s(self) -> float:
        """Of one user while the answer streams: the inverse of the time per output token."""
        return self.counts.committed / self.decoding_s if self.decoding_s else 0.0

    @property
    def in_flight(self) -> float:
        """Requests that decode at a time, on average."""
        return self.decoding_s / self.seconds


@dataclass(slots=True)
class Tally:
    """Adds up steps; `measured` closes it."""

    steps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    decoding_s: float = 0.0
    sums: dict[str, list[int]] = field(default_factory=dict)
    """By domain, in the order of the fields of `Counts`."""
    ttft_s: list[float] = field(default_factory=list)

    def add(self, result: StepResult, seconds: float, domain_of: Mapping[str, str]) -> None:
        """One step; `domain_of` maps request ids to domains."""
        self.steps_s.append(seconds)
        self.prompt_tokens += result.num_prompt_tokens
        for item in result.rounds:
            num_tokens = len(item.token_ids)
            self.tokens += num_tokens
            if item.is_prefill:
                continue
            self.decoding_s += seconds
            sums = self.sums.setdefault(domain_of[item.request_id], [0] * 6)
            sums[0] += 1
            sums[1] += item.num_offered > 0
            sums[2] += item.num_offered
            sums[3] += item.num_planned
            sums[4] += item.num_accepted
            sums[5] += num_tokens

    def measured(self, *, idle_s: float = 0.0) -> Measured:
        """The sums; `idle_s` seconds passed without a step."""
        return Measured(
            seconds=sum(self.steps_s) + idle_s,
            num_steps=len(self.steps_s),
            step_s=statistics.median(self.steps_s) if self.steps_s else 0.0,
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            decoding_s=self.decoding_s,
            domains={domain: Counts.of(sums) for domain, sums in self.sums.items()},
            ttft_s=list(self.ttft_s),
        )
