"""The engine's side, turn by turn, without threads: pieces, cancels, deadlines, failing steps."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from dspark.core import FinishReason, Request, SamplingParams
from dspark.errors import NumericsError
from dspark.llm import LLM
from dspark.serving.answer import Answer
from dspark.serving.engine_loop import Delivery, EngineLoop
from dspark.serving.events import Feed
from dspark.serving.metrics import Meter
from dspark.serving.work import Cause, Failure, Order, Piece

_ids = itertools.count()


class Desk:
    """An engine's loop, what it delivered, and a clock that the test moves."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.now = 0.0
        self.given: list[Delivery] = []
        self.meter = Meter(block_size=llm.block_size)
        self.loop = EngineLoop(
            llm,
            deliver=self.given.extend,
            clock=lambda: self.now,
            meter=self.meter,
            feed=Feed(llm),
        )

    def ask(
        self, prompt: str, *, n: int = 1, deadline_s: float | None = None, **options: Any
    ) -> Order:
        values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **options}
        ids = self.llm.prompt_ids(prompt)
        name = f"o{next(_ids)}"
        requests = [
            Request(id=f"{name}-{i}", prompt_ids=ids, params=SamplingParams(**values))
            for i in range(n)
        ]
        order = Order(id=name, requests=requests, arrived_s=self.now, deadline_s=deadline_s)
        self.loop.inbox.append((True, order))
        return order

    def leave(self, order: Order) -> None:
        self.loop.inbox.append((False, order))

    def run(self) -> None:
        while self.loop.turn():
            pass

    def pieces(self, order: Order, index: int = 0) -> list[Piece]:
        items = [item for of, item in self.given if of is order]
        return [item for item in items if isinstance(item, Piece) and item.answer == index]

    def ids(self, order: Order, index: int = 0) -> list[int]:
        return [token for piece in self.pieces(order, index) for token in piece.token_ids]

    def failures(self, order: Order) -> list[Failure]:
        return [item for of, item in self.given if of is order and isinstance(item, Failure)]

    @property
    def is_empty(self) -> bool:
        load = self.loop.load
        pages = load.num_free_pages + load.num_cached_pages
        return load.num_running == load.num_waiting == 0 and pages == load.num_pages


@pytest.fixture
def desk(llm: LLM) -> Desk:
    return Desk(llm)


def alone(llm: LLM, prompt: str, **options: Any) -> list[int]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **options})
    return list(llm.with_policy("fixed").generate([prompt], params)[0].token_ids)


def test_pieces_joined_are_the_answers_that_each_gets_alone(desk: Desk) -> None:
    orders = {prompt: desk.ask(prompt, n=2) for prompt in ("Hello", "the end", "world of text")}
    desk.run()
    for prompt, order in orders.items():
        expected = alone(desk.llm, prompt)
        assert desk.ids(order, 0) == desk.ids(order, 1) == expected
        text = "".join(piece.text for piece in desk.pieces(order))
        assert text == desk.llm.tokenizer.decode(expected)
        last = desk.pieces(order)[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.counts.num_tokens == 12
        assert last.counts.num_accepted <= last.counts.num_verified <= last.counts.num_offered
    assert desk.is_empty
    assert desk.loop.num_answers == 0


def test_a_turn_delivers_once_whatever_the_number_of_clients(desk: Desk) -> None:
    deliveries: list[int] = []
    desk.loop._outbox._deliver = lambda out: deliveries.append(len(out))
    for prompt in ("Hello", "the end", "world"):
        desk.ask(prompt)
    desk.loop.turn()
    assert deliveries == [3]


def test_one_who_leaves_frees_its_place_and_changes_no_other_answer(desk: Desk) -> None:
    """UC-059."""
    stays, leaves, waits = desk.ask("Hello"), desk.ask("the end", n=3), desk.ask("world")
    desk.loop.turn()
    assert desk.loop.load.num_waiting == 1
    desk.leave(leaves)
    desk.leave(waits)
    desk.loop.turn()
    assert desk.loop.load.num_running == 1
    num_given = len(desk.pieces(leaves))
    desk.run()
    assert len(desk.pieces(leaves)) == num_given
    assert desk.pieces(waits) == []
    assert desk.ids(stays) == alone(desk.llm, "Hello")
    assert desk.is_empty
    assert desk.meter.num_cancelled == 2
    desk.leave(stays)  # over already: nothing happens
    desk.run()
    assert desk.meter.num_cancelled == 2


def test_an_order_fails_at_its_deadline_and_not_before(desk: Desk) -> None:
    late, other = desk.ask("Hello", deadline_s=5.0, max_tokens=100), desk.ask("the end")
    desk.now = 4.9
    desk.loop.turn()
    assert not desk.failures(late)
    desk.now = 5.0
    desk.run()
    (failure,) = desk.failures(late)
    assert failure.cause is Cause.DEADLINE
    assert "5.0 s" in failure.message
    assert desk.ids(other) == alone(desk.llm, "the end")
    assert desk.is_empty


def test_a_deadline_that_is_kept_does_nothing(desk: Desk) -> None:
    order = desk.ask("Hello", deadline_s=5.0)
    desk.run()
    desk.now = 9.0
    desk.ask("the end")
    desk.run()
    assert not desk.failures(order)


def failing(
    call: Callable[..., Any], at: int, error: Exception | None = None
) -> Callable[..., Any]:
    """`call`, but its `at`-th use breaks."""
    uses = itertools.count(1)

    def broken(*args: Any, **options: Any) -> Any:
        if next(uses) == at:
            raise RuntimeError("planted") if error is None else error
        return call(*args, **options)

    return broken


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("place", ["caps", "observe"])  # before the pass, and after the commit
def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, place: str, at: int
) -> None:
    planner = desk.loop.planner
    monkeypatch.setattr(planner, place, failing(getattr(planner, place), at))
    first, second = desk.ask("Hello"), desk.ask("the end", n=2)
    desk.run()
    for order in (first, second):
        (failure,) = desk.failures(order)
        assert failure.cause is Cause.ENGINE
        assert "RuntimeError" in failure.message
        assert order.id in failure.message
        assert "planted" not in failure.message  # insides are for the log
    assert desk.is_empty
    assert desk.meter.num_failed_steps == 1
    third = desk.ask("Hello")
    desk.run()
    assert desk.ids(third) == alone(desk.llm, "Hello")


def test_an_error_that_names_its_request_ends_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = desk.ask("Hello"), desk.ask("the end")
    desk.loop.turn()
    error = NumericsError("The logits are not finite.", request_id=bad.requests[0].id)
    planner = desk.loop.planner
    monkeypatch.setattr(planner, "caps", failing(planner.caps, 2, error))
    desk.run()
    (failure,) = desk.failures(bad)
    assert failure == Failure(Cause.ENGINE, "The logits are not finite.")
    assert desk.ids(good) == alone(desk.llm, "Hello")
    assert desk.is_empty


def test_the_log_names_all_that_a_failing_step_ends(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planner = desk.loop.planner
    monkeypatch.setattr(planner, "caps", failing(planner.caps, 1))
    orders = [desk.ask("Hello"), desk.ask("the end", n=2)]
    desk.run()
    (record,) = caplog.records
    assert vars(record)["orders"] == [order.id for order in orders]
    assert record.exc_info


def test_an_answer_whose_text_fails_ends_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = desk.ask("the end", n=2), desk.ask("Hello")
    add = Answer.add

    def broken(self: Answer, *args: Any) -> Piece:
        if self.order is bad and self.counts.num_tokens > 3:
            raise UnicodeError("planted")
        return add(self, *args)

    monkeypatch.setattr(Answer, "add", broken)
    desk.run()
    (failure,) = desk.failures(bad)
    assert bad.id in failure.message
    assert "UnicodeError" in failure.message
    assert not desk.failures(good)
    assert desk.ids(good) == alone(desk.llm, "Hello")
    assert [vars(record)["order"] for record in caplog.records] == [bad.id]
    assert desk.is_empty


def test_an_engine_whose_books_are_torn_is_built_anew(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = desk.llm.cycle(speculation=True)
    monkeypatch.setattr(cycle.planner, "caps", failing(cycle.planner.caps, 1))
    monkeypatch.setattr(cycle, "check", failing(cycle.check, 2))  # the first is a step's own
    order = desk.ask("Hello")
    desk.run()
    assert desk.failures(order)
    assert desk.llm.cycle(speculation=True) is not cycle
    again = desk.ask("Hello")
    desk.run()
    assert desk.ids(again) == alone(desk.llm, "Hello")


def test_an_order_that_cannot_be_served_is_refused_whole(desk: Desk) -> None:
    order = desk.ask("Hello", max_tokens=100_000)
    twin = desk.ask("Hello")
    twin.requests = [twin.requests[0], twin.requests[0]]  # the second id is in use
    desk.run()
    assert [f.cause for f in desk.failures(order)] == []  # capped by the context
    (failure,) = desk.failures(twin)
    assert failure.cause is Cause.INPUT
    assert desk.pieces(twin) == []
    assert desk.is_empty


def test_no_tokens_need_no_step(desk: Desk) -> None:
    """UC-025."""
    order = desk.ask("Hello", n=2, max_tokens=0)
    desk.run()
    assert [p.finish_reason for p in desk.pieces(order) + desk.pieces(order, 1)] == [
        FinishReason.LENGTH
    ] * 2
    assert desk.meter.num_steps == 0


def test_all_orders_can_be_ended_at_once(desk: Desk) -> None:
    orders = [desk.ask("Hello"), desk.ask("the end")]
    desk.loop.turn()
    desk.loop.fail_all(Failure(Cause.SHUTDOWN, "over"))
    assert [desk.failures(order)[0].message for order in orders] == ["over", "over"]
    assert desk.is_empty


def test_times_are_told_by_token(desk: Desk) -> None:
    """UC-149: a step of several tokens is not a token's time."""
    order = desk.ask("Hello", max_tokens=9)
    desk.now = 0.5
    steps = deque([0.5])
    while desk.loop.turn():
        desk.now += 0.25
        steps.append(desk.now)
    meter = desk.meter
    assert meter.ttft_s.count == 1
    assert meter.ttft_s.total == pytest.approx(0.5)
    assert meter.token_s.count == 8
    last_s = 0.5 + 0.25 * (len(desk.pieces(order)) - 1)
    assert meter.token_s.total == pytest.approx(last_s - 0.5)
    assert meter.per_user_rate.total == pytest.approx(8 / (last_s - 0.5))
    assert meter.finished_by == {"length": 1}
    assert meter.num_generated == 9


def test_nothing_is_recorded_while_nobody_watches(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Feed, "record", failing(Feed.record, 1))
    desk.ask("Hello")
    desk.run()
    assert desk.meter.num_failed_steps == 0
