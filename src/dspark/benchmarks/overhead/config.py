"""How much is asked of engine and server in turn. It asks nothing."""

from dataclasses import dataclass

from dspark.core import SamplingParams
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig:
    """The two measurements: a closed load, and first tokens of one user."""

    users: int = 16
    """Users of the closed load: each asks again as soon as it has its answer."""
    answers: int = 96
    """Answers of the closed load, all users together."""
    max_new_tokens: int = 96
    """Tokens of each answer, at most; an answer may end before."""
    temperature: float = 1.0
    """Sampling temperature; answers have seeds, so both sides give the same ones."""
    first_tokens: int = 24
    """Times that a single user's first token is timed on either side."""
    rounds: int = 3
    """Times that engine and server take the closed load in turn; the median ratio counts."""
    seed: int = 0
    """First of the answers' seeds."""

    def __post_init__(self) -> None:
        for name in ("users", "answers", "first_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if self.answers < 2 * self.users:
            raise InputError(
                f"answers is {self.answers}, but {self.users} users ask for at least two each."
            )
        if self.max_new_tokens < 2:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}, but it must be >= 2.")
        SamplingParams(temperature=self.temperature, seed=self.seed)
