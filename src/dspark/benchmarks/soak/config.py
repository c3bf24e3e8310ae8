"""How long a soak lasts and who comes. It sends nothing."""

from dataclasses import dataclass

from dspark.core import SamplingParams
from dspark.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakConfig:
    """The traffic of `dspark bench soak`."""

    minutes: float = 30.0
    """Length of the whole."""
    least_visits: int = 24
    """It goes on behind that until so many visits have ended: a round of all kinds by default."""
    visitors: int = 24
    """Clients at a time; more than the server runs at once, so that it is saturated."""
    max_new_tokens: int = 96
    """Tokens of each answer, at most."""
    huge_tokens: int = 1500
    """Words of the longest prompts, about a token each."""
    sample_seconds: float = 5.0
    """Time between two looks at the server's memory."""
    settle_seconds: float = 60.0
    """Longest time that the server gets to become idle at the end."""
    max_growth: float = 0.05
    """Share by which memory may grow from the second quarter of the time to the last."""
    seed: int = 0
    """Of who comes when."""
    timeout_seconds: float = 300.0
    """Longest silence of the server."""

    def __post_init__(self) -> None:
        for name in (
            "minutes",
            "least_visits",
            "visitors",
            "max_new_tokens",
            "huge_tokens",
            "sample_seconds",
            "settle_seconds",
            "max_growth",
            "timeout_seconds",
        ):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, but it must be above 0.")
        SamplingParams(seed=self.seed)
