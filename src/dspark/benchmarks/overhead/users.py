"""Users of a server in a process of their own, so that they share no interpreter with it.

Run as a script with the server's port: standard library alone, one line of JSON in, one out:

    {"users": 2, "bodies": [{...}, {...}, {...}]}
    {"now": "full"}                                  when every user has had a first token
    {"now": "over"}                                  when the first user has nothing left to ask
    {"first_s": [0.01, ...], "tokens": 12}           at the end

Each user asks as soon as it has its answer; the next user comes when the one before has its first
token. It does as little as a client can, for it takes its processor time from the server's engine:
one thread waits for all sockets, keeps what they give, and looks at it when the answer has ended.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Answer:
    """One streamed answer on a connection of its own."""

    def __init__(self, port: int, body: bytes) -> None:
        self.started = time.perf_counter()
        self.first_s = 0.0
        self._parts: list[bytes] = []
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    def read(self) -> bool:
        """Take what is there; false if it was the end."""
        data = self.socket.recv(1 << 16)
        self._parts.append(data)
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter() - self.started
        return bool(data)

    def num_tokens(self) -> int:
        """Tokens of the whole answer; raises what the server said instead of one."""
        self.socket.close()
        text = b"".join(self._parts)
        if not self.first_s or b"data: [DONE]" not in text:
            raise RuntimeError(text.decode(errors="replace")[-500:])
        return int(text.rpartition(b'"completion_tokens": ')[2].partition(b",")[0])


def say(**message: Any) -> None:
    """One line to whoever started this process."""
    print(json.dumps(message), flush=True)


def load(port: int, num_users: int, bodies: Sequence[bytes]) -> Mapping[str, Any]:
    """All bodies by so many users; there are at least as many bodies."""
    coming: Iterator[bytes] = iter(bodies)
    first_s: list[float] = []
    num_tokens = num_here = 0
    is_over = False
    sockets = selectors.DefaultSelector()

    def ask() -> bool:
        body = next(coming, None)
        if body is None:
            return False
        answer = Answer(port, body)
        sockets.register(answer.socket, selectors.EVENT_READ, answer)
        return True

    num_here += ask()
    while sockets.get_map():
        for key, _ in sockets.select():
            answer: Answer = key.data
            had_first = answer.first_s > 0.0
            goes_on = answer.read()
            if answer.first_s and not had_first and num_here <= num_users:
                if num_here == num_users:
                    say(now="full")
                    num_here += 1
                else:
                    num_here += ask()
            if goes_on:
                continue
            sockets.unregister(answer.socket)
            num_tokens += answer.num_tokens()
            first_s.append(answer.first_s)
            if not ask() and not is_over:
                is_over = True
                say(now="over")
    sockets.close()
    return {"first_s": first_s, "tokens": num_tokens}


def main() -> None:
    """Serve until the other end closes."""
    port = int(sys.argv[1])
    for line in sys.stdin:
        task = json.loads(line)
        bodies = [json.dumps(body).encode() for body in task["bodies"]]
        try:
            say(**load(port, task["users"], bodies))
        except (OSError, RuntimeError, ValueError) as error:
            say(error=str(error))


if __name__ == "__main__":
    main()
