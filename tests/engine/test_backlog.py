"""Taps that wait: each is fed once, when somebody drafts on its place, or never."""

import pytest
import torch

from dspark.engine import backlog
from dspark.engine.backlog import Backlog

PAGE_SIZE = 4
TABLE = torch.tensor([[1, 2, 0], [1, 3, 5], [4, 0, 0]], dtype=torch.int32)


def taps(values: list[float]) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def backlog_of(places: list[int]) -> Backlog:
    """With a tap that equals its place."""
    waiting = Backlog(num_pages=6, page_size=PAGE_SIZE)
    waiting.keep(taps([float(place) for place in places]), torch.tensor(places))
    return waiting


def taken(
    waiting: Backlog, rows: list[int], lengths: list[int], table: torch.Tensor = TABLE
) -> list[tuple[int, int, float]]:
    """Position, place and tap of each."""
    found = []
    for late in waiting.take(table, rows, lengths):
        assert late.max_visible == int(late.positions_N.max()) + 1
        columns = late.positions_N.tolist(), late.places_N.tolist(), late.taps_NM[:, 0].tolist()
        found += zip(*columns, strict=True)
    return found


@pytest.mark.parametrize("piece", [1, 2, 256])
def test_a_request_takes_its_own_positions_once(
    monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(backlog, "_PIECE", piece)
    waiting = backlog_of([4, 5, 9, 16, 17, 22])
    assert taken(waiting, [0], [7]) == [(0, 4, 4.0), (1, 5, 5.0), (5, 9, 9.0)]
    assert taken(waiting, [0], [7]) == []
    assert taken(waiting, [2], [1]) == [(0, 16, 16.0)]  # its second position is not there yet
    assert taken(waiting, [1, 2], [12, 4]) == [(1, 17, 17.0), (10, 22, 22.0)]
    assert taken(waiting, [0, 1, 2], [12, 12, 4]) == []


def test_a_page_that_requests_share_is_fed_once() -> None:
    assert taken(backlog_of([4, 12]), [0, 1], [8, 8]) == [(0, 4, 4.0), (4, 12, 12.0)]


def test_the_latest_tap_of_a_place_counts_and_none_that_other_tokens_replaced() -> None:
    waiting = backlog_of([4, 5, 6])
    waiting.keep(taps([0.1, 0.2, 0.5]), torch.tensor([5, 6, 5]))
    waiting.forget(torch.tensor([6, 7]))
    assert taken(waiting, [0], [4]) == [(0, 4, 4.0), (1, 5, 0.5)]


def test_what_nobody_takes_is_not_looked_for_in_every_step() -> None:
    """Rejected tokens of a request that ended wait for ever: that must cost others nothing."""
    waiting = backlog_of([4, 17, 20])
    assert taken(waiting, [0], [8]) == [(0, 4, 4.0)]
    pages = torch.arange(6)
    assert pages[waiting._has_late].tolist() == [4, 5]
    assert taken(waiting, [2], [1]) == []  # the rejected token of one that goes on
    waiting.forget(torch.tensor([17]))
    assert taken(waiting, [2], [3]) == []
    assert pages[waiting._has_late].tolist() == [5]


def test_whoever_drafts_all_the_time_leaves_no_news() -> None:
    """Its prompt was fed once; what others left behind for ever is none of its business."""
    waiting = backlog_of([4, 5, 17])
    assert taken(waiting, [0], [2]) == [(0, 4, 4.0), (1, 5, 5.0)]
    for place in (6, 7, 8, 9):
        waiting.forget(torch.tensor([place]))
        assert waiting._news == []
        assert taken(waiting, [0], [1 + place]) == []
    waiting.forget(torch.tensor([17]))  # but here something waits
    assert taken(waiting, [2], [4]) == []


@pytest.mark.parametrize("most_held", [0, 2, 7])
@pytest.mark.parametrize("most_news", [1, 3, 100])
def test_taps_are_held_as_they_came_and_copied_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch, most_held: int, most_news: int
) -> None:
    """Whatever is held, copied, noted at once or late: each place has its latest tap."""
    monkeypatch.setattr(backlog, "_MOST_HELD", most_held)
    monkeypatch.setattr(backlog, "_MOST_NEWS", most_news)
    monkeypatch.setattr(backlog, "_PIECE", 3)
    table = torch.arange(6, dtype=torch.int32)[None]
    rng = torch.Generator().manual_seed(most_held)
    waiting, wanted = Backlog(num_pages=6, page_size=PAGE_SIZE), dict[int, float]()
    for step in range(60):
        places = torch.randint(0, 24, (3,), generator=rng)
        if step % 4 == 3:
            waiting.forget(places)
            wanted = {p: tap for p, tap in wanted.items() if p not in places.tolist()}
        else:
            values = [step + 0.25 * i for i in range(3)]
            waiting.keep(taps(values), places)
            wanted.update(zip(places.tolist(), values, strict=True))
        assert waiting._num_held <= most_held + 3
        if step % 7 == 6:
            length = 1 + step % 24
            found = taken(waiting, [0], [length], table)
            assert {place: tap for _, place, tap in found} == {
                place: tap for place, tap in wanted.items() if place < length
            }
            assert all(position == place for position, place, _ in found)
            wanted = {place: tap for place, tap in wanted.items() if place >= length}


def test_what_was_replaced_is_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end and give their pages to others cost no copy, and no memory."""
    monkeypatch.setattr(backlog, "_MOST_HELD", 8)
    monkeypatch.setattr(backlog, "_PIECE", 4)
    waiting = Backlog(num_pages=6, page_size=PAGE_SIZE)
    for step in range(40):
        waiting.keep(taps([step, step + 0.5]), torch.tensor([4 + step % 3, 8 + step % 3]))
    assert waiting._taps_PM is None
    assert len(waiting._steps) <= 6
    assert sorted(taken(waiting, [0], [3])) == [(0, 4, 39.0), (1, 5, 37.0), (2, 6, 38.0)]
