"""A soak of a real toy server, and of servers with planted faults, which it must find."""

from dataclasses import replace
from http.client import HTTPConnection
from random import Random
from typing import Any

import pytest

from dspark.benchmarks.client_prompts import chats_of
from dspark.benchmarks.http_api import HttpApi
from dspark.benchmarks.soak.config import SoakConfig
from dspark.benchmarks.soak.soak import SoakReport, soak, with_sizes
from dspark.benchmarks.soak.visits import Kind, Task, Verdict, Visitor
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.serving import wire
from dspark.serving.bridge import Bridge, BridgeConfig
from dspark.serving.stream import Stream
from tests.serving.conftest import serving

CONFIG = SoakConfig(
    minutes=0.1 / 60,
    least_visits=60,
    visitors=12,
    max_new_tokens=10,
    huge_tokens=60,
    sample_seconds=0.1,
)


def soaked(url: str, config: SoakConfig = CONFIG) -> SoakReport:
    return soak(HttpApi(url=url), model="toy", chats=chats_of(None, limit=4), config=config)


def test_an_honest_server_passes_and_everybody_came(llm: LLM) -> None:
    with serving(llm) as (app, url, _):
        report = soaked(url, replace(CONFIG, max_growth=1.0))
        assert not app.service.llm.cycle(speculation=True).has_work
        app.service.llm.cycle(speculation=True).check()
    assert report.passed, report.faults
    assert set(report.visits) == {kind.value for kind in Kind}
    assert report.characters > 100
    assert set(report.left) >= {"dspark_open_answers", "pages in use"}
    assert min(report.memory_bytes) > 1e6
    assert report.memory_growth is not None
    assert not any(report.left.values())
    assert report.to_json()["wrong"] == 0


def test_a_wrong_character_under_load_is_found(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that shows only when several answers run at once."""
    honest = wire.Writer.chunk

    def faulty(self: wire.Writer, piece: Any) -> str:
        text = honest(self, piece)
        is_crowded = app.service.bridge.num_open > 1
        return text.replace('"content":"', '"content":"x') if is_crowded else text

    monkeypatch.setattr(wire.Writer, "chunk", faulty)
    with serving(llm) as (app, url, _):
        report = soaked(url)
    assert not report.passed
    assert report.wrong > 0
    assert "character" in report.faults[0]


def test_an_answer_that_never_ends_in_order_is_lost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.serving.replies.DONE", b"")
    with serving(llm) as (_, url, _):
        report = soaked(url)
    assert report.lost > 0
    assert not report.passed


def test_work_that_nobody_ends_is_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of who left is never given back: the gauges say so."""

    def forget(self: Bridge, stream: Stream) -> None:
        self._streams.pop(stream.order, None)

    monkeypatch.setattr(Bridge, "cancel", forget)
    with serving(llm, bridge=BridgeConfig(drain_s=0.1)) as (_, url, _):
        report = soaked(url, replace(CONFIG, settle_seconds=0.1))
    assert any(report.left.values())
    assert not report.passed


@pytest.mark.parametrize("kind", [Kind.ABSENT, Kind.BROKEN, Kind.READER])
def test_a_connection_that_breaks_is_a_visit_lost(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the request is on its way: the visitor comes again and does not die of it."""

    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "planted")

    monkeypatch.setattr(HTTPConnection, "request", broken)
    visitor = Visitor(HttpApi(url="http://127.0.0.1:1/v1"), model="toy", max_tokens=3)
    (chat,) = chats_of(None, limit=1)
    outcome = visitor.visit(kind, Task(chat=chat, text=""), Random(0))
    assert outcome.verdict is Verdict.LOST
    assert "planted" in outcome.why


def test_prompts_of_all_sizes_are_among_them() -> None:
    chats = with_sizes(chats_of(None, limit=2), huge_words=500)
    lengths = [len(chat[-1]["content"].split()) for chat in chats]
    assert lengths[2] == 500
    assert lengths[3] == 1


@pytest.mark.parametrize("name", ["minutes", "visitors", "max_growth"])
def test_a_soak_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        SoakConfig(**{name: 0})
