"""When to draft although it does not pay: to notice that it would again.

Without drafts there is no news of confidences (UC-144). Steps between probes double as long as
probes find nothing, up to a limit. The limit follows from what a probe is expected to lose: all
probes together `LOSS` of the time, so that where drafting almost pays it is tried often. New
requests bring the next probe nearer, as they are likelier to differ.
"""

FIRST = 8
LAST = 128
LOSS = 0.005
_MOST_FOLLOW_UPS = 3


class Probes:
    """Counts steps without drafts."""

    def __init__(self) -> None:
        self._interval = FIRST
        self._steps_since = 0
        self._is_fresh = 0.0
        self._follow_ups = 0

    def begin(self) -> None:
        """A request is new."""
        self._is_fresh += 1.0

    def is_due(self, num_requests: int, loss: float) -> bool:
        """Whether a step that would not draft shall do so. To be asked once in such a step.

        `loss`: share of its speed that a step is expected to lose by drafting.
        """
        if self._is_fresh:
            share = min(self._is_fresh / num_requests, 1.0)
            self._interval = max(FIRST, int(self._interval * (1.0 - share)))
            # a request that is alone is new as a whole: the first step is a probe
            self._steps_since += int(share * self._interval)
            self._is_fresh = 0.0
        self._steps_since += 1
        self._interval = min(self._interval, max(1, int(loss / LOSS)))
        return self._steps_since > self._interval

    def found(self, *, pays: bool) -> None:
        """What a probe showed of its own block: a good one is followed up at once, a few times."""
        if pays and self._follow_ups < _MOST_FOLLOW_UPS:
            self._follow_ups += 1
            self._steps_since = self._interval
        else:
            self._follow_ups = 0
            self._steps_since = 0
            self._interval = min(2 * self._interval, LAST)

    def drafted(self) -> None:
        """A step drafted because it pays."""
        self._interval = FIRST
        self._steps_since = 0
        self._follow_ups = 0
        self._is_fresh = 0.0
