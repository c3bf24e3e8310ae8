"""From the event loop to the engine's thread and back.

One thread owns the LLM and steps while there is work. Orders go to it through a queue, pieces come
back with one wake-up a step, whatever the number of clients. It knows no HTTP.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dspark.engine.adaptive_planner import AdaptivePlanner
from dspark.errors import InputError
from dspark.llm import LLM
from dspark.serving.engine_loop import EngineLoop
from dspark.serving.events import Feed
from dspark.serving.metrics import Gauges, Meter
from dspark.serving.outbox import Delivery
from dspark.serving.stream import Stream
from dspark.serving.work import Cause, Failure, Order

_HANDING_S = 0.003
"""Longest time that the engine waits for pieces to be handed out, which takes a tenth of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """Bounds of what clients may ask of the engine."""

    max_waiting: int = 256
    """Answers that may wait for a place in the engine; more are refused with status 429."""
    max_unread: int = 1024
    """Pieces of a stream that may lie unread before its request is cancelled."""
    deadline_s: float | None = None
    """Seconds after which an answer that is not finished is given up; `None`: never."""
    drain_s: float = 30.0
    """Seconds that running answers get to end when the server is told to stop."""
    stream_gap_s: float = 0.0
    """Seconds for which tokens of a stream may be held back to go with those of the next steps;
    first and last ones never are. 0 sends each step's at once."""

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise InputError(f"max_waiting is {self.max_waiting}, but it must be at least 0.")
        if self.max_unread < 1:
            raise InputError(f"max_unread is {self.max_unread}, but it must be at least 1.")
        if self.deadline_s is not None and not 0.0 < self.deadline_s < math.inf:
            raise InputError(f"deadline_s is {self.deadline_s}, but it must be above 0.")
        if not 0.0 <= self.drain_s < math.inf:
            raise InputError(f"drain_s is {self.drain_s}, but it must be at least 0.")
        if not 0.0 <= self.stream_gap_s < math.inf:
            raise InputError(f"stream_gap_s is {self.stream_gap_s}, but it must be at least 0.")


class Busy(Exception):
    """The waiting line is full; `retry_after_s` says when to come again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Exception):
    """The server is about to stop and takes nothing new."""


class Bridge:
    """The engine as the event loop sees it. `start` and `stop` belong to one event loop."""

    def __init__(
        self,
        llm: LLM,
        config: BridgeConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.llm = llm
        self.config = BridgeConfig() if config is None else config
        self.clock = clock
        self.meter = Meter(block_size=llm.block_size)
        self.feed = Feed(llm)
        self.is_draining = False
        self._engine = EngineLoop(
            llm,
            deliver=self._deliver,
            clock=clock,
            meter=self.meter,
            feed=self.feed,
            stream_gap_s=self.config.stream_gap_s,
        )
        self._streams: dict[Order, Stream] = {}
        self._num_open = 0
        self._finishes: deque[float] = deque(maxlen=32)
        self._wake = threading.Event()
        self._handed = threading.Event()
        self._is_stopping = False
        self._broken: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: asyncio.Event | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Answers that run or wait."""
        return self._num_open

    @property
    def capacity(self) -> int:
        """Answers that may run or wait together."""
        return self.llm.config.max_requests + self.config.max_waiting

    def gauges(self) -> Gauges:
        """What is true now."""
        return Gauges(num_open=self._num_open, load=self._engine.load, policy=self.policy)

    @property
    def policy(self) -> str:
        """The policy in force: verifying whole blocks where step costs are of no use to auto."""
        planner = self._engine.planner
        if isinstance(planner, AdaptivePlanner):
            return self.llm.policy
        if self.llm.drafter is None:
            return "none"
        return "fixed, no cost table" if self.llm.policy.startswith("auto") else self.llm.policy

    def start(self) -> None:
        """Begin to step; called on the event loop that clients are served by."""
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self.feed.start(self._loop)
        self._thread.start()

    def submit(self, order: Order, *, is_whole: bool) -> Stream:
        """Put an order in the line. Raises `Busy` or `Draining`.

        `is_whole`: its reader waits for all of it. Whoever gets a stream must read it to its end
        or `cancel` it.
        """
        if self.is_draining or not self.is_alive:
            raise Draining("The server is about to stop; send the request to another one.")
        num = len(order.requests)
        if self._num_open + num > self.capacity:
            raise Busy(
                f"{self._num_open} answers run or wait and this server holds {self.capacity}; "
                "try again later.",
                self._retry_after_s(num),
            )
        stream = Stream(order, limit=self.config.max_unread, is_whole=is_whole)
        self._streams[order] = stream
        self._num_open += num
        assert self._idle is not None
        self._idle.clear()
        self._engine.inbox.append((True, order))
        self._wake.set()
        return stream

    def cancel(self, stream: Stream) -> None:
        """Nobody wants the rest of this order; nothing happens if it is over."""
        if self._close(stream.order):
            self._engine.inbox.append((False, stream.order))
            self._wake.set()

    async def drain(self) -> None:
        """Take nothing new and wait for what runs, at most `drain_s`; then end it."""
        self.is_draining = True
        self.feed.close()
        assert self._idle is not None
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_s)
        except TimeoutError:
            for stream in list(self._streams.values()):
                stream.put(Failure(Cause.SHUTDOWN, "The server stopped before the answer ended."))
                self.cancel(stream)

    async def stop(self) -> None:
        """End the thread; what still runs ends with an error."""
        self.is_draining = True
        self.feed.close()
        self._is_stopping = True
        self._wake.set()
        while self._thread.is_alive():  # a step in progress ends first
            await asyncio.sleep(0.005)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # a setting of each thread of its own
        try:
            while not self._is_stopping:
                self._wake.clear()
                if not self._engine.turn():
                    self._wake.wait()
        finally:
            self._engine.fail_all(Failure(Cause.SHUTDOWN, "The server stopped."))

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Called in the engine's thread, which rests until clients have what is theirs: otherwise
        both want the interpreter, and a first token waits for the next step to let go of it."""
        assert self._loop is not None
        self._handed.clear()
        self._loop.call_soon_threadsafe(self._hand_out, deliveries)
        self._handed.wait(_HANDING_S)

    def _hand_out(self, deliveries: Sequence[Delivery]) -> None:
        touched: dict[Stream, None] = {}
        for order, item in deliveries:
            stream = self._streams.get(order)
            if stream is None:  # cancelled while the step ran
                continue
            is_kept = stream.put(item)
            touched[stream] = None
            if not is_kept:
                self.cancel(stream)
            elif stream.is_over:
                self._close(order)
                self._finishes.append(self.clock())
        for stream in touched:
            stream.pass_on()
        assert self._loop is not None
        self._loop.call_soon(self._handed.set)  # behind the readers that were woken

    def _close(self, order: Order) -> bool:
        if self._streams.pop(order, None) is None:
            return False
        self._num_open -= len(order.requests)
        if not self._streams and self._idle is not None:
            self._idle.set()
        return True

    def _retry_after_s(self, num: int) -> int:
        """Seconds until so many places are free, as fast as orders ended lately; 1..60."""
        if len(self._finishes) < 2:
            return 1
        span = max(self.clock() - self._finishes[0], 1e-3)
        return min(max(math.ceil(num * span / len(self._finishes)), 1), 60)
