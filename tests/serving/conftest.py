"""A live server around a toy model, on a port of its own, in a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from dspark.engine.cycle import CycleConfig
from dspark.llm import LLM
from dspark.serving.app import App, AppConfig
from dspark.serving.bridge import BridgeConfig
from dspark.serving.server import Server, listen

CONFIG = CycleConfig(num_positions=4096, page_size=8, max_requests=4, is_checked=True)


@pytest.fixture(scope="session")
def toy_llm(model_dir: Path, drafter_dir: Path) -> LLM:
    return LLM.load(
        model_dir,
        drafter=drafter_dir,
        dtype="fp32",
        device="cpu",
        compile=False,
        config=CONFIG,
        policy="fixed",
    )


@contextmanager
def serving(llm: LLM, config: AppConfig | None = None, bridge: BridgeConfig | None = None):
    """A running server: its app and its address."""
    config = AppConfig(served_name="toy") if config is None else config
    app = App(llm, config, bridge)
    found = listen("127.0.0.1", 0)
    server = Server(app, app.service.bridge)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [found]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    try:
        yield app, f"http://127.0.0.1:{found.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        found.close()


@pytest.fixture(scope="session")
def live(toy_llm: LLM) -> Iterator[tuple[App, str]]:
    """One server that the tests of a session share."""
    with serving(toy_llm) as found:
        yield found


@pytest.fixture
def client(live: tuple[App, str]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live[1], timeout=30.0) as found:
        yield found
