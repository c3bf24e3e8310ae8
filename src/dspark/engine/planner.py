"""How many drafted tokens of each request are verified: the fixed-width plan.

It sees the block and each request's cap, nothing of the step that follows.
"""

from collections.abc import Sequence

from dspark.core import DraftBlock, VerifyPlan


class FixedWidthPlanner:
    """Verifies the same number of drafted tokens of every request, up to each request's cap."""

    def __init__(self, width: int) -> None:
        self.width = width

    def caps(self, max_widths: Sequence[int]) -> list[int]:
        """The widest windows worth drafting for, given each request's own limit."""
        return [min(self.width, widest) for widest in max_widths]

    def plan(self, _block: DraftBlock, caps: Sequence[int]) -> VerifyPlan:
        """All of what each cap allows."""
        return VerifyPlan(lengths=tuple(caps))
