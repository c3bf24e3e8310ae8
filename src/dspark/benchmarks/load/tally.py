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
    domains: dict[str, Counts] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)

    def add(self, result: StepResult, seconds: float, domain_of: Mapping[str, str]) -> None:
        """One step; `domain_of` maps request ids to domains."""
        self.steps_s.append(seconds)
        self.prompt_tokens += result.num_prompt_tokens
        for item in result.rounds:
            self.tokens += len(item.token_ids)
            if item.is_prefill:
                continue
            self.decoding_s += seconds
            domain = domain_of[item.request_id]
            self.domains[domain] = self.domains.get(domain, Counts()) + Counts(
                rounds=1,
                drafting=int(item.num_offered > 0),
                offered=item.num_offered,
                planned=item.num_planned,
                accepted=item.num_accepted,
                committed=len(item.token_ids),
            )

    def measured(self, *, idle_s: float = 0.0) -> Measured:
        """The sums; `idle_s` seconds passed without a step."""
        return Measured(
            seconds=sum(self.steps_s) + idle_s,
            num_steps=len(self.steps_s),
            step_s=statistics.median(self.steps_s) if self.steps_s else 0.0,
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            decoding_s=self.decoding_s,
            domains=dict(self.domains),
            ttft_s=list(self.ttft_s),
        )
