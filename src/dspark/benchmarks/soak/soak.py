"""The traffic and the watch over it."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from dspark.benchmarks.client_prompts import Chat
from dspark.benchmarks.http_api import HttpApi
from dspark.benchmarks.soak.config import SoakConfig
from dspark.benchmarks.soak.visits import Kind, Outcome, Task, Verdict, Visitor
from dspark.errors import ServerFault

_SHARES = {
    Kind.READER: 8,
    Kind.WHOLE: 4,
    Kind.SLOW: 2,
    Kind.LEAVER: 5,
    Kind.ABSENT: 2,
    Kind.BROKEN: 1,
    Kind.WRONG: 1,
    Kind.ENDLESS: 1,
}
_IDLE = ("dspark_open_answers", "dspark_running_requests")
"""Gauges that are 0 in a server that has nothing to do."""
_MEMORY = "process_resident_memory_bytes"
_LOOKS = 4
"""At the server's memory, at least: growth is told from quarters of them."""
_PAGES = ("dspark_pages", "dspark_free_pages", "dspark_cached_pages")
"""All pages, empty ones, and those kept for known words; the rest is in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What came of all visits, and what the server holds afterwards."""

    url: str
    minutes: float
    visitors: int
    visits: Mapping[str, Mapping[str, int]]
    """Verdicts by kind of visitor."""
    wrong: int
    lost: int
    characters: int
    """Of answers that were compared with their references."""
    faults: Sequence[str]
    """The first few reasons."""
    left: Mapping[str, float]
    """Gauges of work and pages in use, when all had left."""
    memory_bytes: Sequence[float]
    """Of the server's process, over the time."""
    memory_growth: float | None
    """From the second quarter of the time to the last; `None` if the server does not tell."""
    passed: bool

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""
        return {name: getattr(self, name) for name in self.__slots__}


def references(visitor: Visitor, api: HttpApi, chats: Sequence[Chat]) -> list[Task]:
    """Each greedy answer, asked alone, by plain decoding where the server can be told so."""
    plain: Mapping[str, Any] = {"speculation": {"max_draft": 0}}
    tasks = []
    for chat in chats:
        try:
            found = api.post("/chat/completions", visitor.body(chat, **plain))
        except ServerFault as fault:
            if not plain or fault.name != "HTTP 400":
                raise
            plain = {}
            found = api.post("/chat/completions", visitor.body(chat))
        tasks.append(Task(chat=chat, text=found["choices"][0]["message"]["content"]))
    return tasks


def with_sizes(chats: Sequence[Chat], *, huge_words: int) -> list[Chat]:
    """The conversations, and beside them a huge, a tiny and an odd one."""
    told = " ".join(str(chat[-1]["content"]) for chat in chats)
    words = (told.split() * (huge_words // max(len(told.split()), 1) + 1))[:huge_words]
    extra = (" ".join(words), "Hi", "Ünïcödé 🦊 and 漢字, please repeat.")
    return [*chats, *([{"role": "user", "content": text}] for text in extra)]


def soak(
    api: HttpApi,
    *,
    model: str,
    chats: Sequence[Chat],
    config: SoakConfig,
    on_time: Callable[[float, Counter[Verdict]], None] | None = None,
) -> SoakReport:
    """Run it. `on_time` hears minutes and verdicts so far with every look at the memory.

    Raises `ServerFault` if the server does not even answer the references.
    """
    visitor = Visitor(api, model=model, max_tokens=config.max_new_tokens)
    tasks = references(visitor, api, with_sizes(chats, huge_words=config.huge_tokens))
    crowd = _Crowd(visitor, tasks, config)
    memory = crowd.run(lambda: _gauges(api).get(_MEMORY), on_time)
    left = _settled(api, config.settle_seconds)
    return _report(api.url, config, crowd.outcomes, memory, left)


class _Crowd:
    """Threads, each one visitor after the other."""

    def __init__(self, visitor: Visitor, tasks: Sequence[Task], config: SoakConfig) -> None:
        self._visitor = visitor
        self._tasks = tasks
        self._config = config
        self._lock = threading.Lock()
        self._kinds = _dealt(random.Random(config.seed))
        self.outcomes: list[Outcome] = []
        self._end_s = 0.0

    def run(
        self,
        memory: Callable[[], float | None],
        on_time: Callable[[float, Counter[Verdict]], None] | None,
    ) -> list[float]:
        """Until the time is over and enough have come; the memory that was seen."""
        start_s = time.monotonic()
        self._end_s = start_s + 60.0 * self._config.minutes
        threads = [
            threading.Thread(target=self._visit_again, args=(number,), daemon=True)
            for number in range(self._config.visitors)
        ]
        for thread in threads:
            thread.start()
        seen: list[float] = []
        looks = 0
        while looks < _LOOKS or not self._is_over():
            left_s = self._end_s - time.monotonic()
            pause_s = self._config.sample_seconds
            time.sleep(min(pause_s, left_s) if left_s > 0 else min(pause_s, 0.1))
            size = memory()
            looks += 1
            if size is not None:
                seen.append(size)
            if on_time is not None:
                with self._lock:
                    verdicts = Counter(outcome.verdict for outcome in self.outcomes)
                on_time((time.monotonic() - start_s) / 60.0, verdicts)
        for thread in threads:
            thread.join()
        return seen

    def _visit_again(self, number: int) -> None:
        rng = random.Random(f"{self._config.seed}/{number}")
        while not self._is_over():
            with self._lock:
                kind = next(self._kinds)
            outcome = self._visitor.visit(kind, rng.choice(self._tasks), rng)
            with self._lock:
                self.outcomes.append(outcome)
            if outcome.verdict in (Verdict.BUSY, Verdict.LOST):
                time.sleep(0.2)

    def _is_over(self) -> bool:
        with self._lock:
            enough = len(self.outcomes) >= self._config.least_visits
        return enough and time.monotonic() >= self._end_s


def _dealt(rng: random.Random) -> Iterator[Kind]:
    """Kinds without end, dealt from a shuffled deck in which each stands by its share."""
    deck = [kind for kind, share in _SHARES.items() for _ in range(share)]
    while True:
        rng.shuffle(deck)
        yield from deck


def _settled(api: HttpApi, limit_s: float) -> dict[str, float]:
    """What is left in the server once nothing runs any more, or the time is over."""
    end_s = time.monotonic() + limit_s
    while True:
        found = _gauges(api)
        left = {name: found[name] for name in _IDLE if name in found}
        if all(name in found for name in _PAGES):
            total, free, cached = (found[name] for name in _PAGES)
            left["pages in use"] = total - free - cached
        if not any(left.values()) or time.monotonic() > end_s:
            return left
        time.sleep(0.1)


def _gauges(api: HttpApi) -> dict[str, float]:
    """Samples of /metrics by name and labels; none where the server has no such page."""
    try:
        lines = api.page("/metrics").splitlines()
    except ServerFault:
        return {}
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def _report(
    url: str,
    config: SoakConfig,
    outcomes: Sequence[Outcome],
    memory: Sequence[float],
    left: Mapping[str, float],
) -> SoakReport:
    visits: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = visits.setdefault(outcome.kind.value, {v.value: 0 for v in Verdict})
        row[outcome.verdict.value] += 1
    bad = [o for o in outcomes if o.verdict in (Verdict.WRONG, Verdict.LOST)]
    growth = _growth(memory)
    is_flat = growth is None or growth <= config.max_growth
    return SoakReport(
        url=url,
        minutes=config.minutes,
        visitors=config.visitors,
        visits=visits,
        wrong=sum(o.verdict is Verdict.WRONG for o in bad),
        lost=sum(o.verdict is Verdict.LOST for o in bad),
        characters=sum(o.characters for o in outcomes),
        faults=[f"{o.kind.value}: {o.why}" for o in bad[:10]],
        left=left,
        memory_bytes=memory,
        memory_growth=growth,
        passed=not bad and bool(outcomes) and not any(left.values()) and is_flat,
    )


def _growth(memory: Sequence[float]) -> float | None:
    quarter = len(memory) // 4
    if quarter == 0:
        return None
    return mean(memory[-quarter:]) / mean(memory[quarter : 2 * quarter]) - 1.0
