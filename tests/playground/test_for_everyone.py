"""The playground in Chromium: no request, names for a screen reader, readable on every screen and in both themes."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from chromium import Chromium, Page
from playground_page import PAGE, choose, settle

pytestmark = pytest.mark.browser


# --- requests ---------------------------------------------------------------------------------------


def test_nothing_is_asked_of_the_network_and_nothing_can_be(page: Page) -> None:
    page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    choose(page, "task", "classes")
    page.click(*page.centre("#retrain"))
    settle(page)
    assert page.requests == [PAGE.as_uri()]
    assert page.complaints == []
    assert page.evaluate("fetch('https://example.org/').then(() => 'fetched', () => 'refused')") == "refused"
    page.wait_for("true")
    assert any("Content Security Policy" in words for words in page.complaints)  # the policy refused it, not the wire


# --- for everyone -----------------------------------------------------------------------------------

NAMED = {"button", "checkbox", "radio", "slider", "combobox", "application", "group", "image", "spinbutton", "table"}


@pytest.mark.parametrize("task", ["regression", "classes"])
def test_a_screen_reader_is_told_the_name_of_everything(page: Page, task: str) -> None:
    choose(page, "task", task)
    page.click(*page.centre("summary"))
    nodes = page.named_nodes()
    assert not [role for role, name in nodes if role in NAMED and not name.strip()]
    assert {"slider", "radio", "checkbox", "application", "status"} <= {role for role, _ in nodes}


def test_headings_and_landmarks(page: Page) -> None:
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("document.querySelectorAll('main, header, footer').length") == 3


CONTRAST = """(() => {
  const rgb = (text) => { const v = text.match(/[\\d.]+/g).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c[3] > 0.99) return c; }
    return [255, 255, 255, 1];
  };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest('canvas, script, [hidden]') || !e.getClientRects().length) continue;
    const style = getComputedStyle(e);
    const ink = light(rgb(e.closest('svg') ? style.fill : style.color));
    const [a, b] = [ink, light(ground(e))].sort((p, q) => q - p);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.textContent.trim().slice(0, 30), ratio]);
  }
  return low;
})()"""


SMALL = """[...document.querySelectorAll('button, select, input[type=range]')]
  .filter((e) => e.getClientRects().length && Math.min(e.offsetWidth, e.offsetHeight) < 24).map((e) => e.id)"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 820, 1280])
def test_it_fits_and_can_be_read(browser: Chromium, width: int, dark: bool, tmp_path: Path) -> None:
    with browser.open(PAGE.as_uri(), width=width, dark=dark, touch=width < 500) as opened:
        settle(opened)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.evaluate(CONTRAST) == []
        small = opened.evaluate(SMALL)
        assert small == []
        opened.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_picture_stays_in_sight_on_a_phone(browser: Chromium) -> None:
    with browser.open(PAGE.as_uri(), width=390, height=800, touch=True) as phone:
        settle(phone)
        phone.evaluate("document.getElementById('noise').scrollIntoView({block: 'end', behavior: 'instant'})")
        top, slider = phone.evaluate(
            "['plot', 'noise'].map((id) => document.getElementById(id).getBoundingClientRect().top)"
        )
        assert 0 <= top < slider < 800


def test_inside_the_site_it_takes_the_sites_theme(browser: Chromium, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_bytes(PAGE.read_bytes())
    (tmp_path / "site.html").write_text(
        '<!doctype html><body data-md-color-scheme="slate"><iframe src="page.html" width=900 height=800></iframe>',
        encoding="utf-8",
    )
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser.open(f"http://127.0.0.1:{server.server_port}/site.html") as site:
            inside = "document.querySelector('iframe').contentDocument"
            site.wait_for(f"{inside}.documentElement.dataset.state === 'settled'")
            ground = f"getComputedStyle({inside}.body).backgroundColor"
            dark = site.evaluate(ground)
            site.evaluate("document.body.setAttribute('data-md-color-scheme', 'default')")
            site.wait_for(f"{ground} !== '{dark}'")
            assert site.evaluate(ground) == "rgb(255, 255, 255)"
            assert site.evaluate(f"getComputedStyle({inside}.querySelector('header')).display") == "none"
        server.shutdown()
