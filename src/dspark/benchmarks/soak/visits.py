"""One visitor of each kind, and what came of the visit. Each knows what a right answer is."""

import http.client
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dspark.benchmarks.client_prompts import Chat
from dspark.benchmarks.http_api import HttpApi
from dspark.errors import ServerFault

_PATH = "/chat/completions"
_BUSY = ("HTTP 429", "HTTP 503")


class Kind(StrEnum):
    """Who comes."""

    READER = "reads a stream"
    WHOLE = "waits for the whole answer"
    SLOW = "reads slowly"
    LEAVER = "leaves in the middle"
    ABSENT = "sends and hangs up at once"
    BROKEN = "sends broken JSON"
    WRONG = "asks for what does not exist"
    ENDLESS = "sends a prompt longer than the context"


class Verdict(StrEnum):
    """What came of a visit."""

    RIGHT = "right"
    WRONG = "wrong"  # another text, or a refusal that should not be or the reverse
    LOST = "lost"  # an answer that did not end
    BUSY = "busy"  # turned away in order, by 429 or 503


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A greedy request and the text that answers it."""

    chat: Chat
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One visit."""

    kind: Kind
    verdict: Verdict
    why: str = ""
    characters: int = 0
    """Of text that was compared."""


class Visitor:
    """Calls on one server; safe for threads, each visit has a connection of its own."""

    def __init__(self, api: HttpApi, *, model: str, max_tokens: int) -> None:
        self._api = api
        self._model = model
        self._max_tokens = max_tokens
        self._visits: Mapping[Kind, Callable[[Task, random.Random], Outcome]] = {
            Kind.READER: self._read,
            Kind.WHOLE: self._wait,
            Kind.SLOW: self._read_slowly,
            Kind.LEAVER: self._leave,
            Kind.ABSENT: self._hang_up,
            Kind.BROKEN: self._send_rubbish,
            Kind.WRONG: self._ask_wrongly,
            Kind.ENDLESS: self._overflow,
        }

    def body(self, chat: Chat, **changes: Any) -> dict[str, Any]:
        """A greedy request."""
        return {
            "model": self._model,
            "messages": list(chat),
            "temperature": 0,
            "max_tokens": self._max_tokens,
            **changes,
        }

    def visit(self, kind: Kind, task: Task, rng: random.Random) -> Outcome:
        """What came of it; a fault of the server is an outcome, and so is a connection that it does
        not take or breaks."""
        try:
            return self._visits[kind](task, rng)
        except (OSError, http.client.HTTPException) as error:
            return Outcome(kind=kind, verdict=Verdict.LOST, why=repr(error))
        except ServerFault as fault:
            is_busy = fault.name in _BUSY
            return Outcome(
                kind=kind, verdict=Verdict.BUSY if is_busy else Verdict.LOST, why=str(fault)[:200]
            )

    def _read(self, task: Task, _: random.Random) -> Outcome:
        return _compared(Kind.READER, "".join(self._texts(task)), task.text)

    def _read_slowly(self, task: Task, rng: random.Random) -> Outcome:
        found = []
        for text in self._texts(task):
            found.append(text)
            time.sleep(rng.uniform(0.0, 0.05))
        return _compared(Kind.SLOW, "".join(found), task.text)

    def _wait(self, task: Task, _: random.Random) -> Outcome:
        choice = self._api.post(_PATH, self.body(task.chat))["choices"][0]
        return _compared(Kind.WHOLE, choice["message"]["content"], task.text)

    def _leave(self, task: Task, rng: random.Random) -> Outcome:
        found, left = "", rng.randrange(1, 12)
        with closing(self._texts(task)) as texts:  # type: ignore[type-var]
            for text in texts:
                found += text
                left -= 1
                if left == 0:
                    break
        return _compared(Kind.LEAVER, found, task.text[: len(found)])

    def _hang_up(self, task: Task, _: random.Random) -> Outcome:
        with closing(self._api.connection()) as connection:
            content = json.dumps(self.body(task.chat)).encode()
            self._api.send(connection, "POST", _PATH, content)
        return Outcome(kind=Kind.ABSENT, verdict=Verdict.RIGHT)

    def _send_rubbish(self, _: Task, rng: random.Random) -> Outcome:
        rubbish = (b"{", b'{"messages": [}', b"\xff\xfe", b"[" * 2000, b'"text"', b"null")
        return self._refused(Kind.BROKEN, rng.choice(rubbish))

    def _ask_wrongly(self, task: Task, rng: random.Random) -> Outcome:
        wrong: tuple[dict[str, Any], ...] = (
            {"temperature": -1},
            {"no_such_field": 1},
            {"max_tokens": "many"},
            {"model": "no-such-model"},
            {"messages": []},
            {"n": 0},
        )
        body = self.body(task.chat, **rng.choice(wrong))
        return self._refused(Kind.WRONG, json.dumps(body).encode())

    def _overflow(self, _: Task, __: random.Random) -> Outcome:
        chat = [{"role": "user", "content": "word " * 60_000}]
        return self._refused(Kind.ENDLESS, json.dumps(self.body(chat)).encode())

    def _refused(self, kind: Kind, content: bytes) -> Outcome:
        with closing(self._api.connection()) as connection:
            self._api.send(connection, "POST", _PATH, content)
            response = connection.getresponse()
            said = response.read()
        is_right = 400 <= response.status < 500 and b'"message"' in said
        why = "" if is_right else f"HTTP {response.status} {said[:100]!r}"
        return Outcome(kind=kind, verdict=Verdict.RIGHT if is_right else Verdict.WRONG, why=why)

    def _texts(self, task: Task) -> Iterator[str]:
        for event in self._api.stream(_PATH, self.body(task.chat)):
            for choice in event.data.get("choices") or ():
                yield choice["delta"].get("content") or ""


def _compared(kind: Kind, found: str, expected: str) -> Outcome:
    if found == expected:
        return Outcome(kind=kind, verdict=Verdict.RIGHT, characters=len(found))
    same = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    why = f"character {same}: {found[same : same + 30]!r}, not {expected[same : same + 30]!r}"
    return Outcome(kind=kind, verdict=Verdict.WRONG, why=why, characters=len(found))
