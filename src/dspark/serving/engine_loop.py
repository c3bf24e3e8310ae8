"""The engine's side of the server: takes orders, steps while there is work, gives out pieces.

Everything here runs in one thread; only `inbox` is written by others. It knows no HTTP and no
event loop.
"""

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from dspark.core import RoundResult, StepResult
from dspark.engine.cycle import Cycle
from dspark.engine.load import Load
from dspark.engine.planner import Planner
from dspark.errors import DSparkError, InputError
from dspark.llm import LLM
from dspark.serving.answer import Answer
from dspark.serving.events import Feed
from dspark.serving.metrics import Meter
from dspark.serving.outbox import Delivery, Outbox
from dspark.serving.work import Cause, Failure, Order

log = logging.getLogger("dspark.engine")


class EngineLoop:
    """Orders in flight over the cycle of one LLM."""

    def __init__(
        self,
        llm: LLM,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        clock: Callable[[], float],
        meter: Meter,
        feed: Feed,
        stream_gap_s: float = 0.0,
    ) -> None:
        """`deliver` is called at most once a turn, with all that the turn gave; pieces of running
        answers may wait for those of the next steps, `stream_gap_s` at most."""
        self.inbox: deque[tuple[bool, Order]] = deque()
        """New orders (true) and orders that nobody wants any more (false), in their order."""
        self.meter = meter
        self._llm = llm
        self._cycle: Cycle = llm.cycle(speculation=True)
        self._outbox = Outbox(deliver, gap_s=stream_gap_s)
        self._clock = clock
        self._feed = feed
        self._answers: dict[str, Answer] = {}
        self._left: dict[Order, int] = {}  # answers of an order that are not finished
        self._deadlines: list[tuple[float, int, Order]] = []
        self._numbers = count()
        self._step_s = 0.0
        """Length of the last step; the next one is taken to be as long."""

    @property
    def num_answers(self) -> int:
        """Answers that run or wait."""
        return len(self._answers)

    @property
    def load(self) -> Load:
        """How busy the engine is."""
        return self._cycle.load

    @property
    def planner(self) -> Planner:
        """The planner in force."""
        return self._cycle.planner

    def turn(self) -> bool:
        """Take what came, do one step if there is work; whether there is more to do."""
        while self.inbox:
            is_new, order = self.inbox.popleft()
            if is_new:
                self._begin(order)
            else:
                self._withdraw(order)
        self._end_late_orders()
        if self._cycle.has_work:
            self._step()
        now_s = self._clock()
        next_s = now_s + self._step_s if self._cycle.has_work else None
        self._outbox.release(now_s=now_s, next_s=next_s)
        return self._cycle.has_work or bool(self.inbox)

    def fail_all(self, failure: Failure) -> None:
        """End every order now."""
        for order in list(self._left):
            self._fail(order, failure)
        self._outbox.release(now_s=self._clock(), next_s=None)

    def _begin(self, order: Order) -> None:
        answers = [Answer(order, i, self._llm.tokenizer) for i in range(len(order.requests))]
        begun = []
        try:
            for answer in answers:
                if answer.request.params.max_tokens > 0:
                    self._cycle.submit(answer.request)
                    begun.append(answer)
        except InputError as error:  # all of an order or nothing
            for answer in begun:
                self._cycle.abort(answer.request.id)
            self._outbox.add(order, Failure(Cause.INPUT, str(error)), is_urgent=True)
            return
        self._answers.update((answer.request.id, answer) for answer in begun)
        if begun:
            self._left[order] = len(begun)
        if order.deadline_s is not None:
            heapq.heappush(self._deadlines, (order.deadline_s, next(self._numbers), order))
        for answer in answers:
            if answer.request.params.max_tokens == 0:
                self._outbox.add(order, answer.empty(), is_urgent=True)

    def _withdraw(self, order: Order) -> None:
        if self._left.pop(order, None) is None:
            return
        for request in order.requests:
            if self._answers.pop(request.id, None) is not None:
                self._cycle.abort(request.id)
        self.meter.num_cancelled += 1

    def _fail(self, order: Order, failure: Failure) -> None:
        self._withdraw(order)
        self._outbox.add(order, failure, is_urgent=True)

    def _end_late_orders(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            order = heapq.heappop(self._deadlines)[2]
            if order in self._left:
                waited = self._clock() - order.arrived_s
                message = f"The answer was not finished {waited:.1f} s after it was asked for."
                self._fail(order, Failure(Cause.DEADLINE, message))

    def _step(self) -> None:
        started = self._clock()
        try:
            result = self._cycle.step()
        except DSparkError as error:
            faulty = self._answers.get(error.request_id or "")
            if faulty is None:
                self._recover(error)
            else:  # nothing was committed, and the others go on
                log.exception("a step failed", extra={"order": faulty.order.id})
                self._end_faulty(faulty, str(error))
            return
        except Exception as error:  # whatever broke, clients hear of it and others are served
            self._recover(error)
            return
        now = self._clock()
        self._step_s = now - started
        self.meter.step(result, self._step_s, self._cycle.planner)
        if self._feed.is_watched:
            self._feed.publish(self._record(result, now, self._step_s))
        for item in result.rounds:
            answer = self._answers.get(item.request_id)
            if answer is None or not item.token_ids:  # its order failed in this very step
                continue
            try:
                self._give(answer, item, now)
            except Exception as error:  # its own text's; the step is whole, and the others go on
                log.exception("an answer failed", extra={"order": answer.order.id})
                self._end_faulty(answer, _sentence(error, answer.order))

    def _give(self, answer: Answer, item: RoundResult, now: float) -> None:
        self.meter.piece(answer, item, now)
        is_urgent = answer.first_s is None or item.finish_reason is not None
        self._outbox.add(answer.order, answer.add(item, now), is_urgent=is_urgent)
        if item.finish_reason is None:
            return
        del self._answers[item.request_id]
        self.meter.finished(answer, item.finish_reason)
        left = self._left[answer.order] - 1
        if left:
            self._left[answer.order] = left
        else:
            del self._left[answer.order]

    def _record(self, result: StepResult, now: float, seconds: float) -> str:
        return self._feed.record(
            result,
            planner=self._cycle.planner,
            step_number=self.meter.num_steps,
            now_s=now,
            seconds=seconds,
            load=self._cycle.load,
            params_of=lambda request_id: self._answers[request_id].request.params,
        )

    def _end_faulty(self, answer: Answer, message: str) -> None:
        self.meter.num_failed_steps += 1
        self._fail(answer.order, Failure(Cause.ENGINE, message))

    def _recover(self, error: Exception) -> None:
        """Every request of the cycle ends; pages come back, or a new cycle takes the old one's
        place."""
        self.meter.num_failed_steps += 1
        orders = list(self._left)
        log.exception(
            "a step failed and ends all %d orders in it",
            len(orders),
            extra={"orders": [order.id for order in orders]},
        )
        self._left.clear()
        ids = list(self._answers)
        self._answers.clear()
        for order in orders:
            failure = Failure(Cause.ENGINE, _sentence(error, order))
            self._outbox.add(order, failure, is_urgent=True)
        try:
            for request_id in ids:
                self._cycle.abort(request_id)
            self._cycle.check()
        except Exception:  # its books are torn: nothing of it is kept
            log.exception("the engine's state was damaged; it is built anew")
            self._llm.forget_cycles()
            self._cycle = self._llm.cycle(speculation=True)


def _sentence(error: Exception, order: Order) -> str:
    """For the client: the insides of an error of ours are for the log, where the id finds them."""
    return f"The engine failed at {order.id} ({type(error).__name__}); send the request again."
