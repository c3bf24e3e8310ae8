"""A live server around a toy model, on a port of its own, in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from dspark.engine.cycle import CycleConfig
from dspark.llm import LLM
from dspark.serving.app import App, AppConfig
from dspark.serving.bridge import BridgeConfig
from dspark.serving.server import Server, listen

CONFIG = CycleConfig(num_positions=4096, page_size=8, max_requests=4, is_checked=True)


@pytest.fixture(scope="session")
def loaded(toy_llm: LLM) -> LLM:
    return toy_llm.with_config(CONFIG)


@pytest.fixture
def llm(loaded: LLM) -> LLM:
    """An LLM whose engine nobody else uses."""
    return loaded.with_policy("fixed")


@contextmanager
def serving(
    llm: LLM,
    config: AppConfig | None = None,
    bridge: BridgeConfig | None = None,
    *,
    send_buffer: int | None = None,
) -> Iterator[tuple[App, str, Server]]:
    """A running server: its application, its address, itself.

    `send_buffer`: bytes that the system takes for a client that does not read.
    """
    app = App(llm, AppConfig(served_name="toy") if config is None else config, bridge)
    found = listen("127.0.0.1", 0)
    if send_buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(app, app.service.bridge)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield app, f"http://127.0.0.1:{found.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()
        found.close()


@pytest.fixture(scope="session")
def live(loaded: LLM) -> Iterator[tuple[App, str]]:
    """One server that the tests of a session share."""
    with serving(loaded) as (app, url, _):
        yield app, url


@pytest.fixture
def client(live: tuple[App, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live[1], timeout=30.0) as found:
        yield found
