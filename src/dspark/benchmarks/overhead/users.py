"""Users of a server in a process of their own, so that they share no interpreter with it.

Run as a script with the server's port: standard library alone, one line of JSON in, one out:

    {"users": 2, "bodies": [{...}, {...}, {...}]}
    {"now": "full"}                                  when every user has had a first token
    {"now": "over"}                                  when the first user has nothing left to ask
    {"first_s": [0.01, ...], "tokens": 12}           at the end

Each user asks as soon as it has its answer; the next user comes when the one before has its first
token. It does as little as a client can: it reads bytes, and the usage of the last chunk.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_TAIL = 1500
"""Bytes at the end of a stream that hold the chunk with the usage."""


async def ask(port: int, body: bytes, on_first: Callable[[], None]) -> tuple[float, int]:
    """One streamed answer on a connection of its own: seconds to its first chunk, and tokens."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    first_s, tail = 0.0, b""
    while data := await reader.read(1 << 16):
        tail = (tail + data)[-_TAIL:]
        if not first_s and b"data: " in data:
            first_s = time.perf_counter() - started
            on_first()
    writer.close()
    if b"data: [DONE]" not in tail:
        raise RuntimeError(tail.decode(errors="replace")[-500:])
    return first_s, int(tail.rpartition(b'"completion_tokens": ')[2].partition(b",")[0])


def say(**message: Any) -> None:
    """One line to whoever started this process."""
    print(json.dumps(message), flush=True)


async def load(port: int, num_users: int, bodies: Sequence[bytes]) -> Mapping[str, Any]:
    """All bodies by so many users; there are at least as many bodies."""
    coming: Iterator[bytes] = iter(bodies)
    found: list[tuple[float, int]] = []
    seats = [asyncio.Event() for _ in range(num_users + 1)]
    seats[0].set()
    is_over = False

    def begin(number: int) -> None:
        if number + 1 == num_users and not seats[-1].is_set():
            say(now="full")
        seats[number + 1].set()

    async def user(number: int) -> None:
        nonlocal is_over
        await seats[number].wait()
        for body in coming:
            found.append(await ask(port, body, lambda: begin(number)))
        if not is_over:
            is_over = True
            say(now="over")

    await asyncio.gather(*map(user, range(num_users)))
    return {
        "first_s": [first_s for first_s, _ in found],
        "tokens": sum(tokens for _, tokens in found),
    }


def main() -> None:
    """Serve until the other end closes."""
    port = int(sys.argv[1])
    for line in sys.stdin:
        task = json.loads(line)
        bodies = [json.dumps(body).encode() for body in task["bodies"]]
        try:
            say(**asyncio.run(load(port, task["users"], bodies)))
        except (OSError, RuntimeError, ValueError) as error:
            say(error=str(error))


if __name__ == "__main__":
    main()
