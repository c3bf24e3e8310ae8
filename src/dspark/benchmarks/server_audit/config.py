"""What an audit asks of a server, and with which options. It asks nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.core import SamplingParams
from dspark.errors import InputError

OFF: Mapping[str, Any] = {"speculation": {"max_draft": 0}}
"""What a request says to be decoded without drafts, where the server knows it."""
FILTERED_TOP_K = 8
PENALTY = 1.5
NUM_STATISTICAL = 7
"""Statistical tests of an audit, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """How much is asked, and when a difference counts."""

    temperature: float = 1.0
    """Temperature of the sampled tests; 0 leaves them out. The greedy tests always run."""
    samples: int = 300
    """Answers to each prompt of the sampled tests, from either side."""
    tokens: int = 6
    """First tokens of an answer that the sampled tests compare."""
    sampled_prompts: int = 4
    """Prompts of the sampled tests: the first so many."""
    greedy_tokens: int = 64
    """Tokens of each greedy answer."""
    false_alarm: float = 0.01
    """Chance that a lossless server fails any of the statistical tests, all together."""
    max_noise: float = 0.25
    """Largest measured noise of a gap between two log-probabilities that explains a difference."""
    concurrency: int = 8
    """Requests in flight."""
    top_logprobs: int = 20
    """Most likely tokens that are asked for at each position; many servers allow 20 at most."""
    permutations: int = 4999
    """Exchanges of labels in each two-sample test; no p-value is below 1 / (permutations + 1)."""
    seeded: bool = False
    """Give each sampled request a seed of its own. Servers may draw differently with a seed."""
    seed: int = 0
    """First of these seeds, and seed of the permutations."""

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, seed=self.seed)
        least = {"samples": 20, "tokens": 2, "sampled_prompts": 1, "greedy_tokens": 1}
        for name, value in {**least, "concurrency": 1, "top_logprobs": 2}.items():
            if getattr(self, name) < value:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be >= {value}.")
        if not 0.0 < self.false_alarm < 0.5:
            raise InputError(f"false_alarm is {self.false_alarm}, but it must lie in (0, 0.5).")
        if (self.permutations + 1) * self.false_alarm < NUM_STATISTICAL:
            raise InputError(
                f"permutations is {self.permutations}, too few to reject anything at a false_alarm "
                f"of {self.false_alarm}; take at least {NUM_STATISTICAL / self.false_alarm:.0f}."
            )
        if not self.max_noise >= 0.0:
            raise InputError(f"max_noise is {self.max_noise}, but it must be >= 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One way to ask."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What the request says besides prompt and temperature."""
    top_k: int | None = None
    """The filter among them."""
    is_stated: bool = True
    """Whether the server's log-probabilities tell the chances of a token at temperature 1,
    whether it reports them before or after its own processing."""


PLAIN = Profile(name="plain")
FILTERED = Profile(name="top-k", fields={"top_k": FILTERED_TOP_K}, top_k=FILTERED_TOP_K)
PENALISED = Profile(
    name="penalties",
    fields={"presence_penalty": PENALTY, "frequency_penalty": PENALTY},
    is_stated=False,
)
GREEDY_PROFILES: Sequence[Profile] = (PLAIN, PENALISED)
SAMPLED_PROFILES: Sequence[Profile] = (PLAIN, FILTERED, PENALISED)
