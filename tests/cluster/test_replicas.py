"""Replicas on a real local Ray: answers, shared prefixes, and a kill -9 in the middle of work."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray", reason="replicas need the extra 'cluster'")
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TIMEOUT_S = 900
"""So long that only a fault reaches it: the machine may have much else to do."""
CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}


@pytest.fixture(scope="module")
def url(model_dir: Path, drafter_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """`dspark serve --replicas 2` as a person starts it."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "dspark", "serve", str(model_dir), "--served-name", "toy"]
    command += ["--drafter", str(drafter_dir), "--dtype", "fp32", "--eager", "--policy", "fixed"]
    command += ["--replicas", "2", "--port", str(port), "--device", "cpu"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        address = f"http://127.0.0.1:{port}"
        try:
            while process.poll() is None:
                try:
                    if httpx.get(f"{address}/ready", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            assert process.poll() is None, log.read_text()
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()


def ask(url: str, **changes: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **changes}, timeout=TIMEOUT_S)


def generated(url: str) -> dict[str, float]:
    """Tokens by replica."""
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    lines = [s for s in text.splitlines() if s.startswith("dspark_generated_tokens_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_equal_prompts_get_equal_answers_from_one_replica(url: str) -> None:
    before = generated(url)
    texts = {ask(url, max_tokens=9).json()["choices"][0]["message"]["content"] for _ in range(6)}
    assert len(texts) == 1
    after = generated(url)
    assert len(after) == 2
    # the beginning is known to one of them, and nothing else runs: it gets all the work
    assert sorted(after[name] - before.get(name, 0.0) for name in after) == [0.0, 54.0]


def test_many_prompts_use_both(url: str) -> None:
    def one(number: int) -> int:
        prompt = f"{number} " * 40
        message = [{"role": "user", "content": prompt}]
        return ask(url, messages=message, max_tokens=20, ignore_eos=True).status_code

    before = generated(url)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(one, range(32))) == {200}
    after = generated(url)
    assert all(after[name] > before.get(name, 0.0) for name in after)


def test_the_live_page_meets_one_replica(url: str) -> None:
    """Its crowd comes where it watches; asked elsewhere it would not come, for nobody watches.

    The chat comes before the crowd: steps of a crowd that nobody reads would push it out.
    """
    with httpx.stream("GET", f"{url}/live/events", timeout=TIMEOUT_S) as feed:
        events = (json.loads(line[6:]) for line in feed.iter_lines() if line)
        assert next(events)["type"] == "hello"
        headers = {"X-Dspark-Watched": "1"}
        body = {**CHAT, "max_tokens": 5}
        found = httpx.post(
            f"{url}/v1/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S
        )
        name = f"{found.json()['id']}-0"
        assert any(r["id"] == name for event in events for r in event["rounds"])
        for users in (2, 1, 0):
            answer = httpx.post(f"{url}/live/crowd", json={"users": users}, timeout=TIMEOUT_S)
            assert answer.json()["users"] == users


def workers() -> Iterator[int]:
    """Processes of replicas."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name = (folder / "cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            if name.startswith(b"ray::ServeReplica:dspark"):
                yield int(folder.name)


def test_a_killed_replica_costs_no_request_that_had_no_token(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """kill -9 under load: whole answers are right, broken ones say so, and all comes back. It
    prints how many were broken and how long that took."""
    options = {"max_tokens": 200, "ignore_eos": True}
    whole = ask(url, **options).json()["choices"][0]["message"]["content"]
    results: list[str] = []
    has_begun = threading.Event()

    def stream() -> None:
        parts, error = [], None
        body = {**CHAT, **options, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S
        ) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                has_begun.set()
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    error = error or event.get("error")
                    parts += [c["delta"]["content"] for c in event.get("choices", ())]
        text = "".join(parts)
        assert whole.startswith(text)
        assert error is not None or text == whole
        results.append("broken" if error else "whole")

    with ThreadPoolExecutor(24) as pool:
        futures = [pool.submit(stream) for _ in range(24)]
        has_begun.wait()
        os.kill(next(workers()), signal.SIGKILL)
        killed_s = time.monotonic()
        for future in futures:
            future.result()
        answered_s = time.monotonic() - killed_s
    assert len(results) == 24
    assert "whole" in results
    while len(generated(url)) < 2:  # Ray starts another one
        time.sleep(0.2)
    recovered_s = time.monotonic() - killed_s
    with capsys.disabled():
        print(
            f"\nkill -9 of one of 2 replicas under 24 streams: {results.count('whole')} whole, "
            f"{results.count('broken')} ended by an error event, all over after "
            f"{answered_s:.1f} s, 2 replicas again after {recovered_s:.1f} s"
        )
    assert ask(url, **options).json()["choices"][0]["message"]["content"] == whole
