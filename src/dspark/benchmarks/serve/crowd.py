"""A load on a server: users who ask again, or arrivals; threads, since each only waits.

The load goes on until every request that counts has ended, so that none of them finishes in an
emptier server than it began in. What is still running then is broken off.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from dspark.benchmarks.client_prompts import Chat
from dspark.benchmarks.serve.call import ABANDONED, Call, StreamApi, call
from dspark.benchmarks.serve.config import Load, LoadKind, ServeBenchConfig

MOST_IN_FLIGHT = 512
"""Requests of an open load at a time; what comes beyond counts as turned away."""
TURNED_AWAY = "too many in flight"
UNFINISHED = "unfinished"
_PAUSE_S = 0.05  # of a user whose request failed at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """All calls of one point, and the time that is measured."""

    calls: Sequence[Call]
    start_s: float
    end_s: float

    @property
    def counted(self) -> Sequence[Call]:
        """Requests that began in the measured time."""
        return [c for c in self.calls if self.start_s <= c.start_s < self.end_s]


class Run:
    """One point while it is measured."""

    def __init__(
        self,
        api: StreamApi,
        *,
        model: str,
        chats: Sequence[Chat],
        load: Load,
        config: ServeBenchConfig,
    ) -> None:
        self._api = api
        self._model = model
        self._chats = chats
        self._load = load
        self._config = config
        self._numbers = count()
        self._order = _shuffled(len(chats), config.seed)
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._num_due = 0
        self._num_running = 0
        self._is_over = threading.Event()
        self._start_s = time.perf_counter() + config.warmup_seconds
        self._end_s = self._start_s + config.seconds

    def measure(self) -> Crowd:
        """Runs the load to its end."""
        is_closed = self._load.kind is LoadKind.CLOSED
        threads = self._start_users() if is_closed else []
        if not is_closed:
            self._send_arrivals(threads)
        self._wait()
        self._is_over.set()
        for thread in threads:
            thread.join()
        return Crowd(calls=self._finished(), start_s=self._start_s, end_s=self._end_s)

    def _start_users(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._user, daemon=True) for _ in range(int(self._load.level))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _user(self) -> None:
        while not self._is_over.is_set():
            if self._ask().fault is not None:
                self._is_over.wait(_PAUSE_S)

    def _send_arrivals(self, threads: list[threading.Thread]) -> None:
        """Requests at Poisson times, until those that count have ended."""
        chance = random.Random(self._config.seed)
        at_s = time.perf_counter()
        while not self._is_done():
            at_s += chance.expovariate(self._load.level)
            self._is_over.wait(max(0.0, min(at_s, self._limit_s) - time.perf_counter()))
            if self._num_running >= MOST_IN_FLIGHT:
                self._turn_away()
                continue
            threads[:] = [thread for thread in threads if thread.is_alive()]
            thread = threading.Thread(target=self._ask, daemon=True)
            threads.append(thread)
            thread.start()

    def _wait(self) -> None:
        while not self._is_done():
            self._is_over.wait(0.01)

    @property
    def _limit_s(self) -> float:
        return self._end_s + self._config.timeout_seconds

    def _is_done(self) -> bool:
        now_s = time.perf_counter()
        return now_s >= self._limit_s or (now_s >= self._end_s and self._num_due == 0)

    def _ask(self) -> Call:
        with self._lock:
            body = self._body(next(self._numbers))
            is_due = self._start_s <= time.perf_counter() < self._end_s
            self._num_due += is_due
            self._num_running += 1
        found = call(self._api, body, is_over=self._is_over.is_set)
        with self._lock:
            self._num_due -= is_due
            self._num_running -= 1
            self._calls.append(found)
        return found

    def _turn_away(self) -> None:
        now_s = time.perf_counter()
        none = Call(
            start_s=now_s,
            end_s=now_s,
            num_tokens=0,
            num_prompt_tokens=0,
            arrivals=(),
            fault=TURNED_AWAY,
        )
        with self._lock:
            self._calls.append(none)

    def _finished(self) -> list[Call]:
        """All calls; one that counts and was broken off by the limit of time is a failure."""
        return [_renamed(c) if self._counts(c) and c.fault == ABANDONED else c for c in self._calls]

    def _counts(self, found: Call) -> bool:
        return self._start_s <= found.start_s < self._end_s

    def _body(self, number: int) -> Mapping[str, Any]:
        chat = self._chats[next(self._order)]
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(chat),
            "max_tokens": self._config.max_new_tokens,
            "temperature": self._config.temperature,
            "stream_options": {"include_usage": True},
        }
        if self._config.temperature > 0.0:
            body["seed"] = self._config.seed * 1_000_003 + number
        return body


def measure(
    api: StreamApi,
    *,
    model: str,
    chats: Sequence[Chat],
    load: Load,
    config: ServeBenchConfig,
) -> Crowd:
    """One point of the bench."""
    return Run(api, model=model, chats=chats, load=load, config=config).measure()


Measure = Callable[[Load], Crowd]


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Places without end: all of them in a new order every time through."""
    chance = random.Random(seed)
    while True:
        order = list(range(size))
        chance.shuffle(order)
        yield from order


def _renamed(found: Call) -> Call:
    return Call(
        start_s=found.start_s,
        end_s=found.end_s,
        num_tokens=0,
        num_prompt_tokens=0,
        arrivals=(),
        fault=UNFINISHED,
    )
