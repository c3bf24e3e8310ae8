"""A speculative chat server of a few dozen lines, lossless or with a fault planted on purpose.

Plain Python over an alphabet of six letters, one letter a token. It answers bodies of the chat
API in this process, so that a test can ask it thousands of times a second.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from dspark.errors import ServerFault

TOKENS = "abcdef"
BLOCK_SIZE = 3


class Fault(StrEnum):
    """What a wrong engine does."""

    ACCEPTS_ALL = "every drafted token is accepted"
    RESAMPLES = "after a rejection the token comes from the whole distribution"
    NO_FILTER = "inside a block the filter is not applied"
    NO_PENALTY = "inside a block the penalties look at committed tokens only"


@dataclass
class ToyServer:
    """`Api` of the audit."""

    fault: Fault | None = None
    knows_switch: bool = True
    """Whether it knows `speculation`; otherwise it ignores the field, as vLLM does."""
    states_raw: bool = False
    """Whether log-probabilities are those before filters and penalties."""
    noise: float = 0.0
    """Largest shift of a logit by the shape of a pass: present in speculative answers only."""
    seed: int = 0
    widest: int = BLOCK_SIZE
    num_asked: int = field(default=0, init=False)

    def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        assert path == "/chat/completions"
        self.num_asked += 1
        width = self.widest
        if self.knows_switch and "speculation" in body:
            width = body["speculation"]["max_draft"]
            if width < 0:
                raise ServerFault("HTTP 400", f"speculation.max_draft is {width}")
        chance = random.Random(self.seed * 1_000_003 + self.num_asked)
        return _Decoding(self, body, min(width, self.widest), chance).answer()


@dataclass
class _Decoding:
    server: ToyServer
    body: Mapping[str, Any]
    width: int
    chance: random.Random
    tokens: list[int] = field(default_factory=list)
    num_drafted: int = 0

    def answer(self) -> Mapping[str, Any]:
        prompt = self.body["messages"][-1]["content"]
        entries = []
        while len(self.tokens) < self.body["max_tokens"]:
            start = len(self.tokens)
            self.tokens += self._round(prompt)
            for end in range(start, len(self.tokens)):
                entries.append(self._entry(prompt, self.tokens[:end], self.tokens[end]))
        limit = self.body["max_tokens"]
        text = "".join(TOKENS[token] for token in self.tokens[:limit])
        return {
            "choices": [
                {
                    "message": {"content": text},
                    "finish_reason": "length",
                    "logprobs": {"content": entries[:limit]},
                }
            ],
            "usage": {
                "completion_tokens": limit,
                "speculation": {"drafted_tokens": self.num_drafted},
            },
        }

    def _round(self, prompt: str) -> list[int]:
        block: list[int] = []
        # the first token is the prompt's own, as in a real engine
        for _ in range(self.width if self.tokens else 0):
            self.num_drafted += 1
            q = self._probs(prompt, block, is_draft=True)
            p = self._probs(prompt, block, is_draft=False)
            drafted = self._draw(q)
            if self.chance.random() < min(1.0, p[drafted] / q[drafted]) or (
                self.server.fault is Fault.ACCEPTS_ALL
            ):
                block.append(drafted)
                continue
            rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            return [*block, self._draw(p if self.server.fault is Fault.RESAMPLES else rest)]
        return [*block, self._draw(self._probs(prompt, block, is_draft=False))]

    def _probs(self, prompt: str, block: Sequence[int], *, is_draft: bool) -> list[float]:
        is_inside = self.width > 0 and bool(self.tokens) and len(block) < self.width
        logits = self._logits(prompt, [*self.tokens, *block], is_draft=is_draft)
        fault = self.server.fault
        seen = self.tokens if fault is Fault.NO_PENALTY else [*self.tokens, *block]
        k = None if fault is Fault.NO_FILTER and is_inside else self.body.get("top_k")
        return self._processed(logits, seen, k)

    def _processed(
        self, logits: Sequence[float], seen: Sequence[int], k: int | None
    ) -> list[float]:
        values = [
            value
            - self.body.get("presence_penalty", 0.0) * (token in seen)
            - self.body.get("frequency_penalty", 0.0) * seen.count(token)
            for token, value in enumerate(logits)
        ]
        temperature = self.body["temperature"]
        if temperature == 0.0:
            best = values.index(max(values))
            return [float(token == best) for token in range(len(values))]
        least = sorted(values, reverse=True)[: k or len(values)][-1]
        weights = [math.exp(v / temperature) if v >= least else 0.0 for v in values]
        return [weight / sum(weights) for weight in weights]

    def _logits(self, prompt: str, prefix: Sequence[int], *, is_draft: bool) -> list[float]:
        values = _table(prompt, tuple(prefix[-2:]), is_draft)
        if self.server.noise and self.width:
            shift = random.Random(repr((prompt, prefix)))
            values = [v + shift.uniform(-1, 1) * self.server.noise for v in values]
        return values

    def _entry(self, prompt: str, prefix: Sequence[int], token: int) -> Mapping[str, Any]:
        """What an honest engine states of a position: at temperature 0 before the argmax."""
        logits = self._logits(prompt, prefix, is_draft=False)
        if not self.server.states_raw:
            body = {**self.body, "temperature": self.body["temperature"] or 1.0}
            probs = _Decoding(self.server, body, self.width, self.chance)._processed(
                logits, prefix, self.body.get("top_k")
            )
        else:
            probs = [math.exp(v) / sum(map(math.exp, logits)) for v in logits]
        stated = [math.log(p) if p > 0.0 else -9999.0 for p in probs]
        order = sorted(range(len(stated)), key=lambda i: -stated[i])[: self.body["top_logprobs"]]
        return {
            "token": TOKENS[token],
            "bytes": list(TOKENS[token].encode()),
            "logprob": stated[token],
            "top_logprobs": [
                {"token": TOKENS[i], "logprob": stated[i]} for i in order if stated[i] > -9999.0
            ],
        }

    def _draw(self, weights: Sequence[float]) -> int:
        return self.chance.choices(range(len(weights)), weights)[0]


@cache
def _table(prompt: str, last: tuple[int, ...], is_draft: bool) -> list[float]:
    """Logits behind two letters. The drafter's are half the target's own, half something else."""
    own = random.Random(repr((prompt, last)))
    values = [own.gauss(0.0, 1.5) for _ in TOKENS]
    other = random.Random(repr((prompt, last, "drafter")))
    return [0.5 * v + other.gauss(0.0, 1.2) for v in values] if is_draft else values


@contextmanager
def served(toy: ToyServer) -> Iterator[str]:
    """The toy behind HTTP on this machine: its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "toy"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._send(200, toy.post(self.path.removeprefix("/v1"), body))
            except ServerFault as fault:
                self._send(400, {"error": {"message": str(fault)}})

        def _send(self, status: int, value: Mapping[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
