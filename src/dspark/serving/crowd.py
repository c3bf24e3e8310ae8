"""Synthetic users of the live page: each asks, reads, and asks again, as a client would.

A browser keeps few connections to one server, so the page cannot be a crowd by itself. The users
leave when nobody watches the feed any more. It knows no HTTP.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from itertools import count

from dspark.serving.bridge import Bridge, Busy, Draining
from dspark.serving.protocol import ChatRequest
from dspark.serving.stream import ClientGone
from dspark.serving.work import Order

MOST_USERS = 64
_TOKENS = 128
_PAUSE_S = 0.2  # of a user whom a full server turned away
_PATIENCE = 3  # looks at an unwatched feed before everybody leaves
_PROMPTS = (
    "Tell a short story about a lighthouse and a storm.",
    "Write a Python function that removes duplicates from a list and explain it.",
    "A shop sells 12 pens for 9 euros. What do 20 pens cost? Show each step.",
    "Explain how a bicycle stays upright, to a curious child.",
    "Write a letter to a friend who moves to another country.",
    "List ten things to take along on a walk in the mountains, with reasons.",
    "Explain what a binary search does and where it is useful.",
    "A tank holds 240 litres and loses 7 litres an hour. How much is left after a day?",
    "Describe a market in the early morning.",
    "Write a function in JavaScript that counts the words of a text.",
    "What are the differences between a frog and a toad?",
    "Give a plan for learning to cook in four weeks.",
)

Prepare = Callable[[ChatRequest, str], Awaitable[Order]]
"""Makes an order of a request and an id."""


class Crowd:
    """As many users as were asked for last; lives on the event loop."""

    def __init__(self, bridge: Bridge, prepare: Prepare) -> None:
        self._bridge = bridge
        self._prepare = prepare
        self._users: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._numbers = count()

    @property
    def most(self) -> int:
        """Users, at most."""
        return min(MOST_USERS, 2 * self._bridge.llm.config.max_requests, self._bridge.capacity)

    @property
    def size(self) -> int:
        """Users who are there."""
        return len(self._users)

    def resize(self, num_users: int) -> None:
        """Let users come or go; none come where nobody watches, or the server stops."""
        is_wanted = self._bridge.feed.is_watched and not self._bridge.is_draining
        wanted = min(num_users, self.most) if is_wanted else 0
        while len(self._users) > wanted:
            self._users.pop().cancel()
        while len(self._users) < wanted:
            self._users.append(asyncio.create_task(self._user()))
        if self._users and self._watch is None:
            self._watch = asyncio.create_task(self._leave_unwatched())

    async def _user(self) -> None:
        while True:
            body = ChatRequest.model_validate(
                {
                    "messages": [
                        {"role": "user", "content": _PROMPTS[next(self._numbers) % len(_PROMPTS)]}
                    ],
                    "max_tokens": _TOKENS,
                    "temperature": 1.0,
                }
            )
            try:
                await self._ask(await self._prepare(body, f"crowd-{secrets.token_hex(8)}"))
            except Busy:
                await asyncio.sleep(_PAUSE_S)
            except (Draining, ClientGone):
                return

    async def _ask(self, order: Order) -> None:
        stream = self._bridge.submit(order, is_whole=True)
        try:
            await stream.get()
        finally:
            self._bridge.cancel(stream)

    async def _leave_unwatched(self) -> None:
        num_looks = 0
        while self._users and num_looks < _PATIENCE:
            await asyncio.sleep(1.0)
            num_looks = 0 if self._bridge.feed.is_watched else num_looks + 1
        self._watch = None
        if num_looks:
            self.resize(0)
