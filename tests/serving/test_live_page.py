"""The live page in a real browser: chat, load up, budget falls; and what it counts."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.benchmarks.race import usable_processors
from dspark.llm import LLM
from dspark.serving.app import AppConfig
from tests.serving.conftest import CONFIG, serving

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_MS = 120_000
QUIET, BUSY = 4, 1  # guesses checked per answer: of one answer, of more


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium in PATH")
    if len(usable_processors()) < 2:
        pytest.skip("a browser and an engine that never rests need two processors")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def url(model_dir: Path, drafter_dir: Path) -> Iterator[str]:
    """A server whose budget depends on nothing but the load."""
    llm = LLM.load(
        model_dir,
        drafter=drafter_dir,
        dtype="fp32",
        device="cpu",
        compile=False,
        config=replace(CONFIG, is_checked=False),
        policy=f"table:1={QUIET},{CONFIG.max_requests}={BUSY}",
    )
    with serving(llm, AppConfig(served_name="toy")) as (_, found, _):
        yield found


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page, open; it asks nobody but this server, and no script fails."""
    found = browser.new_page(viewport={"width": 1440, "height": 1000})
    faults: list[str] = []
    found.on("pageerror", lambda error: faults.append(str(error)))
    found.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    found.on(
        "request",
        lambda sent: None if sent.url.startswith((url, "data:")) else faults.append(sent.url),
    )
    found.goto(url)
    found.wait_for_function("document.getElementById('model').textContent.includes('table:')")
    yield found
    found.close()
    assert faults == []


def figure(page: Any, name: str) -> float:
    text = page.inner_text(f"#{name}")
    return float("nan") if text == "-" else float(text)


def test_the_chat_shows_what_the_api_says(page: Any, url: str) -> None:
    page.fill("#ask", "Hello there")
    page.keyboard.press("Enter")
    page.wait_for_selector("#log .count", timeout=WAIT_MS)
    shown = page.text_content("#log .answer")
    body = {
        "messages": [{"role": "user", "content": "Hello there"}],
        "temperature": 0,
        "max_tokens": 512,
    }
    told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert told["choices"][0]["message"]["content"].strip() in shown
    assert page.text_content("#log .user") == "Hello there"
    assert f"{told['usage']['completion_tokens']} tokens" in page.inner_text("#log .count")
    assert page.evaluate("document.activeElement.id") == "ask"


def test_load_goes_up_and_the_budget_falls(page: Any, url: str) -> None:
    """By the keyboard alone."""
    page.focus("#busier")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('users').textContent === '1 user'")
    quiet = f"Math.abs(Number(document.getElementById('budget').textContent) - {QUIET}) < 0.5"
    page.wait_for_function(quiet, timeout=WAIT_MS)
    page.wait_for_selector("#blocks .cell.own", timeout=WAIT_MS)
    for _ in range(5):
        page.keyboard.press("Enter")
        page.wait_for_timeout(30)
    # at once, for users come and go: between two looks some may be about to ask again
    busy = f"Number(document.getElementById('budget').textContent) < {BUSY + 0.6}"
    many = "Number(document.getElementById('running').textContent) >= 3"
    shown = "document.querySelectorAll('#blocks .row').length >= 3"
    page.wait_for_function(f"{busy} && {many} && {shown}", timeout=WAIT_MS)
    assert figure(page, "budget") <= figure(page, "offered")
    for name in ("load-chart", "frontier", "reliability", "pool"):
        words = page.get_attribute(f"#{name} svg", "aria-label")
        assert words, name
    page.focus("#quieter")
    before = page.inner_text("#users")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "before => document.getElementById('users').textContent !== before",
        arg=before,
        timeout=WAIT_MS,
    )
    httpx.post(f"{url}/live/crowd", json={"users": 0}, timeout=60).raise_for_status()


def test_the_view_can_be_held(page: Any) -> None:
    page.click("#pause")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.click("#busier")
    page.wait_for_function("document.getElementById('users').textContent === '1 user'")
    page.wait_for_timeout(400)
    assert page.locator("#blocks .row").count() == 0
    page.click("#pause")
    page.wait_for_selector("#blocks .row", timeout=WAIT_MS)
    page.click("#quieter")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(page: Any, scheme: str) -> None:
    """Contrast of at least 4.5 between each text colour and its ground (WCAG 2.1, 1.4.3)."""
    page.emulate_media(color_scheme=scheme)
    pairs = [
        *[("text", "ground"), ("text", "panel"), ("soft", "panel"), ("soft", "ground")],
        *[("kept", "kept-soft"), ("kept-text", "kept-soft"), ("refused", "refused-soft")],
        *[
            ("own", "own-soft"),
            ("soft", "dropped-soft"),
            ("curve", "panel"),
            ("text", "curve-soft"),
        ],
    ]
    colours = {name for pair in pairs for name in pair}
    read = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name)"
    values = {name: page.evaluate(read, name).strip() for name in colours}
    for text, ground in pairs:
        assert contrast(values[text], values[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    lights = sorted((luminance(one), luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_nothing_is_wider_than_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


STEPS = """async () => {
  const { History, peak } = await import('./history.js');
  const { drawPool } = await import('./charts.js');
  const history = new History();
  history.greet({ block_size: 3 });
  const round = (id, more) => ({ id, prefill: false, offered: 3, planned: 2, accepted: 1,
    survival: [0.95, 0.55, 0.15], drafted: ['a', 'b', 'c'], tokens: ['a', 'x'],
    origins: ['accepted', 'corrected'], finish: null, ...more });
  for (let n = 0; n < 10; n += 1) {
    history.add({ time: n * 0.1, seconds: 0.1, predicted_seconds: 0.09, running: 2, waiting: 1,
      budget: 4, why: 'drafted', theta: [10, 14, 18, 16], dropped: 0, rounds: [
        round('one', {}), round('two', { survival: [0.75, 0.35, 0.25], accepted: 2,
          tokens: ['a', 'b', 'y'], origins: ['accepted', 'accepted', 'bonus'] }) ] });
  }
  history.add({ time: 1.0, seconds: 0.1, predicted_seconds: null, running: 1, waiting: 0,
    budget: 3, theta: null, dropped: 0,
    rounds: [round('one', { planned: 3, accepted: 0, tokens: ['z'], origins: ['corrected'],
      finish: 'stop' })] });
  const place = document.createElement('div');
  drawPool(place, { ...history, pool: () => history.pool(), last: { theta: [10, 14, 18, 16],
    budget: 2 } });
  return { now: history.now(), bins: history.bins, loads: history.byLoad(), pool: history.pool(),
    words: history.answers.get('two').words.length, peak: peak([1, 5, 2]),
    label: place.querySelector('svg').getAttribute('aria-label') };
}"""


def test_the_page_counts_as_the_metrics_do(page: Any) -> None:
    """UC-149 and method section 8: times of several tokens, and no trimmed guess is a rejection."""
    found = page.evaluate(STEPS)
    now = found["now"]
    assert now["tau"] == pytest.approx((10 * 5 + 1) / 21)
    assert now["planned"] == pytest.approx((10 * 4 + 3) / 21)
    assert now["total"] == pytest.approx((10 * 5 + 1) / 1.1)
    assert now["perUser"] == pytest.approx((10 * 5 + 1) / (10 * 0.2 + 0.1))
    kept = {i: (b["count"], b["kept"]) for i, b in enumerate(found["bins"]) if b["count"]}
    # chances 0.15 and 0.25 were never checked; the round that ended inside its block is left out
    assert kept == {9: (10, 10), 5: (10, 0), 7: (10, 10), 3: (10, 10)}
    (load,) = found["loads"]
    assert (load["load"], load["planned"]) == (2, pytest.approx(2.0))
    assert load["perUser"] == pytest.approx(25.0)
    assert [guess["chance"] for guess in found["pool"]] == [0.95, 0.55, 0.15]
    assert found["words"] == 30
    assert found["peak"] == 1
    assert "highest, 18.0 tokens a second, with 2 checked" in found["label"]
