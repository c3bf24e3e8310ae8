"""What the engine's thread has made and not yet handed over. It knows no HTTP and no thread.

Waking clients takes processor time from the next step, as much for one token as for several. So
pieces of several steps go together, where the eye does not see it.
"""

from collections.abc import Callable, Sequence

from dspark.serving.work import Failure, Order, Piece

Delivery = tuple[Order, Piece | Failure]


class Outbox:
    """Deliveries in their order, held back for a short while."""

    def __init__(self, deliver: Callable[[Sequence[Delivery]], None], *, gap_s: float) -> None:
        """`gap_s`: seconds that may pass between two deliveries; 0 delivers at every release."""
        self._deliver = deliver
        self._gap_s = gap_s
        self._held: list[Delivery] = []
        self._urgent: set[Order] = set()
        self._released_s = 0.0

    def add(self, order: Order, item: Piece | Failure, *, is_urgent: bool) -> None:
        """Put something in; what is urgent takes along whatever its order has waiting."""
        self._held.append((order, item))
        if is_urgent:
            self._urgent.add(order)

    def release(self, *, now_s: float, next_s: float | None) -> None:
        """Deliver all that would wait too long until `next_s`, the next release as far as one
        knows; `None`: there may be none."""
        if next_s is None or next_s - self._released_s > self._gap_s:
            self._released_s = now_s
            out, self._held = self._held, []
        else:
            out = [item for item in self._held if item[0] in self._urgent]
            self._held = [item for item in self._held if item[0] not in self._urgent]
        self._urgent.clear()
        if out:
            self._deliver(out)
