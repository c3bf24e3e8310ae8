"""The audit of our own server, whole engine and HTTP between: it passes, and fails when broken."""

import random
import secrets
from dataclasses import replace

import pytest
import torch

from dspark.algorithms import acceptance
from dspark.benchmarks.http_api import HttpApi, first_model
from dspark.benchmarks.server_audit.asking import Side
from dspark.benchmarks.server_audit.audit import SAME_SERVER, audit, find_reference
from dspark.benchmarks.server_audit.config import AuditConfig
from dspark.benchmarks.server_audit.outcome import AuditReport
from dspark.serving.app import App

CONFIG = AuditConfig(
    samples=25,
    tokens=4,
    sampled_prompts=2,
    greedy_tokens=24,
    permutations=999,
    concurrency=4,
)
CHATS = [[{"role": "user", "content": f"say {word}"}] for word in ("one", "two", "three")]


def audited(url: str, config: AuditConfig) -> AuditReport:
    api = HttpApi(url=url, timeout_s=30.0)
    side = Side(api=api, model=first_model(api), top_logprobs=config.top_logprobs)
    return audit(
        side,
        url=url,
        reference=find_reference(side),
        reference_name=SAME_SERVER,
        chats=CHATS,
        config=config,
    )


@pytest.fixture(autouse=True)
def _same_draws_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get one by chance, of which one audit in a hundred would fail."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.mark.parametrize(("seeded", "concurrency"), [(False, 1), (True, 4)])
def test_our_server_passes_at_both_temperatures(
    live: tuple[App, str], seeded: bool, concurrency: int
) -> None:
    """Without seeds draft and target are coupled maximally, with seeds by shared noise.

    One request at a time takes its seed in a known order.
    """
    report = audited(live[1], replace(CONFIG, seeded=seeded, concurrency=concurrency))
    assert report.lossless, [test for test in report.tests if not test.passed]
    assert report.untested == []
    assert report.reference == SAME_SERVER
    assert report.divergences == []
    assert report.num_drafted
    assert len(report.tests) == 10


def test_an_engine_that_accepts_every_draft_is_found_out(
    live: tuple[App, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault lies where requests with filters are judged; greedy ones never come there."""
    monkeypatch.setattr(
        acceptance, "accept_probability", lambda p, q: torch.ones_like(p, dtype=torch.float64)
    )
    report = audited(live[1], CONFIG)
    failed = {test.name for test in report.tests if not test.passed}
    assert "T=1 top-k: distribution of plain decoding" in failed
    assert "T=1 top-k: places as stated" in failed
    assert not any(name.startswith("T=0") for name in failed), failed
