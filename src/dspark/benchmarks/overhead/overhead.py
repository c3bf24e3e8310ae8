"""`dspark bench overhead`: the server beside its own engine, on the same weights and requests.

Both take the same load in turn: as many users, who come one after the other and ask the same
questions with the same seeds. The engine alone is a cycle like the server's, stepped from here
while the server rests; so what differs is HTTP, JSON, tokenizing, detokenizing and the ways between
threads and processes. The clients' own work is on the server's side.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.benchmarks.client_prompts import Chat
from dspark.benchmarks.environment import Environment
from dspark.benchmarks.overhead.config import OverheadConfig
from dspark.core import Request, SamplingParams
from dspark.engine.cycle import Cycle
from dspark.errors import ServerFault
from dspark.llm import LLM
from dspark.serving.app import App
from dspark.serving.server import Server, listen

_USERS = Path(__file__).parent / "users.py"
_FIRST_TOKENS = 8  # of the answers whose first token is timed: a server goes on meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A load, taken once. Its steady state begins when every user has had a first token and ends
    when the first one has nothing left to ask."""

    seconds: float
    """Of the steady state."""
    tokens: int
    """Of the steady state."""
    steps: int
    """Of the engine, in the steady state."""
    all_tokens: int
    """Of all answers from beginning to end: the same on both sides, as they have seeds."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all users."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadReport:
    """Both ratios, and what they are made of."""

    policy: str
    users: int
    answers: int
    throughput_ratio: float
    """Of the server to its engine, median of the rounds; 1 is no overhead."""
    engine: Sequence[Taken]
    server: Sequence[Taken]
    """Round by round."""
    first_token_ratio: float
    """Of the server's median time to a first token to the engine's; 1 is no overhead."""
    engine_first_ms: float
    """Median time of the engine's pass over the prompt, to its first token."""
    server_first_ms: float
    prompt_tokens: float
    """Of a prompt, on average."""
    environment: Environment

    def to_json(self) -> Mapping[str, Any]:
        """The keys of the `--json` line."""
        found = asdict(self)
        for side in ("engine", "server"):
            for row, taken in zip(found[side], getattr(self, side), strict=True):
                row["tokens_per_s"] = taken.tokens_per_s
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where an engine stands."""

    at_s: float = 0.0
    tokens: int = 0
    steps: int = 0

    def after(self, tokens: int) -> "Counts":
        """One step later."""
        return Counts(at_s=time.perf_counter(), tokens=self.tokens + tokens, steps=self.steps + 1)


def taken(marks: Sequence[Counts], *, all_tokens: int) -> Taken:
    """What lies between both ends of the steady state."""
    start, end = marks
    return Taken(
        seconds=end.at_s - start.at_s,
        tokens=end.tokens - start.tokens,
        steps=end.steps - start.steps,
        all_tokens=all_tokens,
    )


class Engine:
    """The cycle of an LLM, stepped from this thread."""

    def __init__(self, llm: LLM, cycle: Cycle, config: OverheadConfig) -> None:
        self._llm = llm
        self._cycle = cycle
        self._config = config

    def take(self, chats: Sequence[Chat]) -> Taken:
        """The load of `users.load`: a user asks when it has its answer, the next one comes when
        the one before has its first token."""
        requests = iter([self._request(n, chat) for n, chat in enumerate(chats)])
        counts = Counts()
        marks: list[Counts] = []
        num_users = self._ask(requests)
        while self._cycle.has_work:
            result = self._cycle.step()
            num_firsts = sum(item.is_prefill for item in result.rounds)
            num_ended = sum(item.finish_reason is not None for item in result.rounds)
            counts = counts.after(sum(len(item.token_ids) for item in result.rounds))
            for _ in range(num_firsts):
                if num_users < self._config.users:
                    num_users += self._ask(requests)
                elif not marks:
                    marks.append(counts)
            asked = sum(self._ask(requests) for _ in range(num_ended))
            if asked < num_ended and len(marks) == 1:
                marks.append(counts)
        return taken(marks, all_tokens=counts.tokens)

    def first_s(self, number: int, chat: Chat) -> float:
        """Seconds from a request to its first token."""
        request = self._request(number, chat)
        started = time.perf_counter()
        self._cycle.submit(request)
        while not self._cycle.step().rounds:
            pass
        seconds = time.perf_counter() - started
        self._cycle.abort(request.id)
        return seconds

    def _ask(self, requests: Iterator[Request]) -> int:
        request = next(requests, None)
        if request is None:
            return 0
        self._cycle.submit(request)
        return 1

    def _request(self, number: int, chat: Chat) -> Request:
        params = SamplingParams(
            temperature=self._config.temperature,
            max_tokens=self._config.max_new_tokens,
            seed=self._config.seed + number,
        )
        return Request(id=f"alone-{number}", prompt_ids=self._llm.prompt_ids(chat), params=params)


class Users:
    """The users' process, and what they ask."""

    def __init__(self, port: int, config: OverheadConfig) -> None:
        self._config = config
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_USERS), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def take(self, chats: Sequence[Chat], count: Callable[[], Counts]) -> Taken:
        """The load; `count` tells where the server's engine stands."""
        bodies = [self._body(n, chat, self._config.max_new_tokens) for n, chat in enumerate(chats)]
        marks: list[Counts] = []
        reply = self._send(self._config.users, bodies, lambda: marks.append(count()))
        return taken(marks, all_tokens=int(reply["tokens"]))

    def first_s(self, number: int, chat: Chat) -> float:
        """Seconds from a request to its first chunk."""
        reply = self._send(1, [self._body(number, chat, _FIRST_TOKENS)], lambda: None)
        return float(reply["first_s"][0])

    def _body(self, number: int, chat: Chat, max_tokens: int) -> Mapping[str, Any]:
        return {
            "messages": list(chat),
            "max_tokens": max_tokens,
            "temperature": self._config.temperature,
            "seed": self._config.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _send(
        self, num_users: int, bodies: Sequence[Mapping[str, Any]], on_mark: Callable[[], None]
    ) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"users": num_users, "bodies": bodies}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            reply: Mapping[str, Any] = json.loads(line)
            if "now" in reply:
                on_mark()
            elif "error" in reply:
                raise ServerFault("failed", f"The server failed: {reply['error']}")
            else:
                return reply
        raise ServerFault("failed", "The users' process died.")


@contextmanager
def serving(app: App) -> Iterator[int]:
    """The application on a free port of this machine, in a thread; its port."""
    found = listen("127.0.0.1", 0)
    server = Server(app, app.service.bridge)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]}, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield found.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        found.close()


def measure(
    llm: LLM,
    chats: Sequence[Chat],
    config: OverheadConfig,
    *,
    on_round: Callable[[int, str, float], None] = lambda *_: None,
) -> OverheadReport:
    """Engine and server in turn. The LLM must keep no prompts, for these come back.

    `on_round(round, side, tokens_per_s)` hears of each load. Raises `ServerFault` where an answer
    fails.
    """
    asked = [chats[n % len(chats)] for n in range(max(config.answers, config.first_tokens))]
    app = App(llm)
    alone = llm.with_config(llm.config)  # a cycle belongs to one thread
    engine = Engine(alone, alone.cycle(speculation=True), config)
    with serving(app) as port:
        users = Users(port, config)
        try:
            return _measure(app, engine, users, asked, config, on_round)
        finally:
            users.close()


def _measure(
    app: App,
    engine: Engine,
    users: Users,
    asked: Sequence[Chat],
    config: OverheadConfig,
    on_round: Callable[[int, str, float], None],
) -> OverheadReport:
    meter = app.service.bridge.meter

    def count() -> Counts:
        return Counts(at_s=time.perf_counter(), tokens=meter.num_generated, steps=meter.num_steps)

    def served(chats: Sequence[Chat]) -> Taken:
        return users.take(chats, count)

    few = asked[: config.users]
    engine.take(few)  # neither side pays for what is made once
    served(few)
    firsts = _first_tokens(engine, users, asked[: config.first_tokens])
    loads: dict[str, list[Taken]] = {"engine": [], "server": []}
    takes = {"engine": engine.take, "server": served}
    for number in range(config.rounds):
        # by turns the other one first: a machine that slows down meets both alike
        for side in ("engine", "server") if number % 2 == 0 else ("server", "engine"):
            loads[side].append(takes[side](asked[: config.answers]))
            on_round(number, side, loads[side][-1].tokens_per_s)
    pairs = zip(loads["engine"], loads["server"], strict=True)
    prompt_ids = [app.service.llm.prompt_ids(chat) for chat in asked]
    return OverheadReport(
        policy=app.service.bridge.policy,
        users=config.users,
        answers=config.answers,
        throughput_ratio=statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs),
        engine=loads["engine"],
        server=loads["server"],
        first_token_ratio=firsts["server"] / firsts["engine"],
        engine_first_ms=1e3 * firsts["engine"],
        server_first_ms=1e3 * firsts["server"],
        prompt_tokens=statistics.mean(map(len, prompt_ids)),
        environment=Environment.here(),
    )


def _first_tokens(engine: Engine, users: Users, asked: Sequence[Chat]) -> Mapping[str, float]:
    """Median seconds to the first token of each side, prompt by prompt in turn."""
    found: dict[str, list[float]] = {"engine": [], "server": []}
    for number, chat in enumerate(asked):
        found["engine"].append(engine.first_s(number, chat))
        found["server"].append(users.first_s(number, chat))
    return {side: statistics.median(values) for side, values in found.items()}
