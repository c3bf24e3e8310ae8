"""On what a cost was measured; a table of another machine or model is refused.
It holds names and values, and looks at neither a machine nor a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dspark.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Named facts, sorted: target, drafter, dtype, device, threads, versions of libraries."""

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **facts: object) -> Self:
        """Facts in any order; values are compared as text."""
        return cls(facts=tuple(sorted((name, str(value)) for name, value in facts.items())))

    def difference(self, other: "Fingerprint") -> str | None:
        """What differs, as words (`this / other`); `None` if nothing does."""
        mine, others = dict(self.facts), dict(other.facts)
        parts = [
            f"{name} {mine.get(name, 'unknown')} / {others.get(name, 'unknown')}"
            for name in sorted(mine.keys() | others.keys())
            if mine.get(name) != others.get(name)
        ]
        return ", ".join(parts) if parts else None

    def require_same(self, here: "Fingerprint") -> None:
        """Raises `ModelError` unless both are equal; it says what differs."""
        difference = self.difference(here)
        if difference is not None:
            raise ModelError(
                f"The step costs were measured on something else (there / here: {difference}); "
                "run `dspark profile` again."
            )

    def to_json(self) -> dict[str, str]:
        """Name to value."""
        return dict(self.facts)

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Self:
        """What `to_json` wrote."""
        return cls.of(**data)
