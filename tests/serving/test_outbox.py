"""What is delivered when, without an engine."""

from dspark.core import FinishReason, Request, SamplingParams
from dspark.serving.outbox import Delivery, Outbox
from dspark.serving.work import Counts, Order, Piece


def order(name: str) -> Order:
    request = Request(id=name, prompt_ids=[1], params=SamplingParams())
    return Order(id=name, requests=[request], arrived_s=0.0)


def piece(text: str, reason: FinishReason | None = None) -> Piece:
    return Piece(0, text, [1], None, reason, Counts())


def test_pieces_wait_for_one_another_but_never_longer_than_the_gap() -> None:
    given: list[list[Delivery]] = []
    outbox = Outbox(lambda items: given.append(list(items)), gap_s=0.05)
    a, b = order("a"), order("b")
    sizes = []
    for step in range(1, 7):  # 20 ms each
        outbox.add(a, piece(f"a{step}"), is_urgent=False)
        outbox.add(b, piece(f"b{step}"), is_urgent=False)
        outbox.release(now_s=0.02 * step, next_s=0.02 * step + 0.02)
        sizes.append(sum(map(len, given)))
    assert sizes == [0, 4, 4, 8, 8, 12]
    texts = [item.text for items in given for of, item in items if of is a]
    assert texts == [f"a{step}" for step in range(1, 7)]


def test_what_is_urgent_takes_its_own_order_along() -> None:
    given: list[Delivery] = []
    outbox = Outbox(given.extend, gap_s=10.0)
    a, b = order("a"), order("b")
    outbox.add(a, piece("a1"), is_urgent=False)
    outbox.add(b, piece("b1"), is_urgent=False)
    outbox.add(a, piece("a2", FinishReason.STOP), is_urgent=True)
    outbox.release(now_s=1.0, next_s=1.1)
    assert [item.text for _, item in given] == ["a1", "a2"]
    outbox.release(now_s=1.1, next_s=1.2)
    assert len(given) == 2
    outbox.release(now_s=1.2, next_s=None)  # there may be no further step
    assert [item.text for _, item in given] == ["a1", "a2", "b1"]


def test_without_a_gap_every_release_delivers() -> None:
    given: list[Delivery] = []
    outbox = Outbox(given.extend, gap_s=0.0)
    for step in (1, 2):
        outbox.add(order("a"), piece("x"), is_urgent=False)
        outbox.release(now_s=float(step), next_s=float(step + 1))
        assert len(given) == step
