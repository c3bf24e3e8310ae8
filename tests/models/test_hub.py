"""Without a network a name is refused at once; nothing here goes to the network."""

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dspark.data.prompts import read_prompts
from dspark.errors import InputError, ModelError
from dspark.models import hub
from dspark.models.target_source import resolve_source

PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Addresses that were tried; none answers, and the hub's cache is empty."""
    tried: list[Any] = []

    def refuse(address: Any, timeout: float) -> None:
        assert 0 < timeout <= 5
        tried.append(address)
        raise ConnectionRefusedError

    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    return tried


def test_a_name_is_asked_for_once_and_refused_in_one_sentence(asked: list[Any]) -> None:
    """The hub's own library would try six times, over 25 seconds."""
    with pytest.raises(ModelError, match=r"nobody/nothing is no directory.*hub\.example cannot"):
        resolve_source("nobody/nothing")
    with pytest.raises(InputError, match=r"nobody/words:test is no file.*hub\.example, where a"):
        read_prompts("nobody/words:test")
    assert asked == [("hub.example", 443)] * 2


def test_a_name_in_the_cache_of_the_hub_needs_no_network(asked: list[Any], tmp_path: Path) -> None:
    snapshot = tmp_path / "models--nobody--nothing" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert resolve_source("nobody/nothing") == "nobody/nothing"
    assert asked == []


def test_who_is_offline_by_choice_is_not_asked_for(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.is_out_of_reach("nobody/nothing")
    assert asked == []


def test_a_proxy_may_know_more(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert not hub.is_out_of_reach("nobody/nothing")
    assert asked == []


@pytest.mark.parametrize(
    ("text", "words"), [("", "name is empty"), ("gone/", "gone/ does not exist")]
)
def test_what_can_be_no_name_is_not_asked_for(asked: list[Any], text: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        resolve_source(text)
    assert asked == []
