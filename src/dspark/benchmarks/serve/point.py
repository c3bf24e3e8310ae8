"""From calls to the figures of one point. It sends nothing.

A point in which every request failed has errors and no figures (UC-154).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.benchmarks.serve.call import ABANDONED, Call
from dspark.benchmarks.serve.config import Load, LoadKind, ServeBenchConfig
from dspark.benchmarks.serve.crowd import Crowd

Percentiles = Mapping[str, float]
CountTokens = Callable[[str], int]
"""Tokens of a text by the model's own tokenizer."""
_USAGE_SLACK = 0.1
"""An end token without text, and tokens drawn that the tokenizer would have joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load, measured."""

    kind: str
    level: float
    num_requests: int
    """Requests that began in the measured time."""
    errors: int
    error_names: Mapping[str, int]
    tokens_per_s: float | None
    """Output tokens of all users that came in the measured time."""
    per_user_tokens_per_s: float | None
    """Of one user while the answer streams: the inverse of the mean time between tokens."""
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    """Over answers, of their mean time between tokens."""
    chunk_gap_ms: Percentiles | None
    """Over chunks, of the time between them."""
    mean_tokens: float | None
    """Of an answer."""
    mean_prompt_tokens: float | None
    goodput_per_s: float | None
    """Requests a second within the limits of the service level; `None` without limits."""
    goodput_share: float | None
    tokens_per_chunk: float | None
    acceptance: float | None
    """Accepted over drafted tokens, where the server tells."""
    usage_ratio: float | None = None
    """Tokens of the usage over those of the text, where a tokenizer counts them (UC-152)."""

    @property
    def doubt(self) -> str | None:
        """What is wrong with the usage, on which all speeds rest; `None`: nothing that is known."""
        if self.usage_ratio is None or abs(self.usage_ratio - 1.0) <= _USAGE_SLACK:
            return None
        return (
            f"{self.load.name}: usage counts {self.usage_ratio:.2f} times the tokens of the texts, "
            "so that its speeds are doubtful"
        )

    @property
    def concurrency(self) -> int | None:
        """Users of a closed load."""
        return int(self.level) if self.kind == LoadKind.CLOSED else None

    @property
    def has_failed(self) -> bool:
        """Whether it has no figures."""
        return self.tokens_per_s is None

    @property
    def load(self) -> Load:
        """The load that it belongs to."""
        return Load(kind=LoadKind(self.kind), level=self.level)

    def to_json(self) -> Mapping[str, Any]:
        """The keys of a point of the `--json` line."""
        rate = self.level if self.kind == LoadKind.OPEN else None
        return {"concurrency": self.concurrency, "rate": rate, **asdict(self)}


def point_of(
    load: Load, crowd: Crowd, config: ServeBenchConfig, *, count_tokens: CountTokens | None = None
) -> Point:
    """All figures of one load."""
    counted = crowd.counted
    good = [found for found in counted if found.fault is None]
    names = Counter(found.fault for found in counted if found.fault is not None)
    served = [found for found in good if _is_served(found, config)]
    seconds = crowd.end_s - crowd.start_s
    has_sla = config.has_sla and bool(good)
    return Point(
        kind=load.kind.value,
        level=load.level,
        num_requests=len(counted),
        errors=names.total(),
        error_names=dict(names.most_common()),
        tokens_per_s=_tokens(crowd, good) / seconds if good else None,
        per_user_tokens_per_s=_speed(good),
        ttft_ms=_percentiles(found.ttft_s for found in good),
        itl_ms=_percentiles(found.itl_s for found in good if found.itl_s is not None),
        chunk_gap_ms=_percentiles(gap for found in good for gap in found.gaps_s),
        mean_tokens=_mean([found.num_tokens for found in good]),
        mean_prompt_tokens=_mean([found.num_prompt_tokens for found in good]),
        goodput_per_s=len(served) / seconds if has_sla else None,
        goodput_share=len(served) / len(counted) if has_sla else None,
        tokens_per_chunk=_ratio(
            sum(found.num_tokens for found in good), sum(len(found.arrivals) for found in good)
        ),
        acceptance=_ratio(
            sum(found.num_accepted or 0 for found in good),
            sum(found.num_drafted or 0 for found in good),
        ),
        usage_ratio=None if count_tokens is None else _usage_ratio(good, count_tokens),
    )


def _usage_ratio(good: Sequence[Call], count_tokens: CountTokens) -> float | None:
    return _ratio(
        sum(found.num_tokens for found in good), sum(count_tokens(found.text) for found in good)
    )


def _tokens(crowd: Crowd, good: Sequence[Call]) -> float:
    """Tokens that came in the measured time, of requests that began before it too.

    What was broken off has no usage; its chunks count by the others' tokens a character.
    """
    size = sum(s for found in good for _, s in found.arrivals)
    per_character = sum(found.num_tokens for found in good) / size
    total = 0.0
    for found in crowd.calls:
        if found.fault is None:
            total += found.tokens_between(crowd.start_s, crowd.end_s)
        elif found.fault == ABANDONED:
            inside = (s for at, s in found.arrivals if crowd.start_s <= at < crowd.end_s)
            total += per_character * sum(inside)
    return total


def _speed(good: Sequence[Call]) -> float | None:
    streamed = [found for found in good if found.num_tokens > 1]
    return _ratio(
        sum(found.num_tokens - 1 for found in streamed),
        sum(found.decoding_s for found in streamed),
    )


def _is_served(found: Call, config: ServeBenchConfig) -> bool:
    ttft_ms, itl_ms = config.sla_ttft_ms, config.sla_itl_ms
    if ttft_ms is not None and found.ttft_s * 1e3 > ttft_ms:
        return False
    return itl_ms is None or found.itl_s is None or found.itl_s * 1e3 <= itl_ms


def _percentiles(seconds: Iterable[float]) -> Percentiles | None:
    """In milliseconds, by linear interpolation."""
    values = sorted(seconds)
    if not values:
        return None
    return {f"p{q}": 1e3 * _quantile(values, q / 100) for q in (50, 99)}


def _quantile(values: Sequence[float], share: float) -> float:
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
