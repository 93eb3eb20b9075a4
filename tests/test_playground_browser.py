"""The playground as it is shipped, in Chromium: dragged, clicked, typed at, read aloud, watched for requests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from chromium import Chromium, Page

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "playground" / "page.html"
CASES = ROOT / "playground" / "tests" / "cases.json"
SETTLED = "document.documentElement.dataset.state === 'settled'"
N_START = 16  # points of the regression


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    with browser.open(PAGE.as_uri()) as opened:
        settle(opened)
        yield opened


def settle(page: Page) -> None:
    page.wait_for(SETTLED)


def n_points(page: Page) -> int:
    return page.evaluate("document.querySelectorAll('.point').length")


def band(page: Page) -> dict[int, float]:
    """Two standard deviations at x = −3, 0 and 3, as someone who cannot see the picture is told."""
    words = page.evaluate("document.getElementById('scene-text').textContent").replace("−", "-")
    return {int(x): float(std) for x, std in re.findall(r"at x = (-?\d+): -?[\d.]+ ± (\d+\.\d+)", words)}


def number(page: Page, element: str) -> float:
    return float(page.evaluate(f"document.getElementById('{element}').textContent").replace("−", "-"))


def place(page: Page, x: float, y: float) -> tuple[float, float]:
    """A place of the plane in the window."""
    page.centre("#plot")
    left, top, width = page.evaluate(
        "(() => { const b = document.getElementById('scene').getBoundingClientRect(); return [b.x, b.y, b.width]; })()"
    )
    return left + (x + 4) * width / 8, top + (2.75 - y) * width / 8


def point(page: Page, i: int) -> tuple[float, float]:
    """A point in the window, scrolled as `place` does."""
    page.centre("#plot")
    middle = "(() => { const b = document.querySelectorAll('.point .hit')[%d].getBoundingClientRect();"
    x, y = page.evaluate(middle % i + " return [b.x + b.width / 2, b.y + b.height / 2]; })()")
    return x, y


def choose(page: Page, name: str, value: str) -> None:
    page.click(*page.centre(f"input[name={name}][value={value}]"))
    settle(page)


def focused(page: Page, attribute: str = "aria-label") -> str:
    return page.evaluate(f"document.activeElement.getAttribute('{attribute}')")


# --- numbers ----------------------------------------------------------------------------------------


def test_the_page_that_is_shipped_gives_lapwings_numbers(page: Page) -> None:
    cases = CASES.read_text(encoding="utf-8")
    found = page.evaluate(f"window.playground.compare({cases})")
    assert len(found) > 10 * len(json.loads(cases)["cases"])
    wrong = [each for each in found if not (each["error"] is not None and each["error"] < 1e-6)]
    assert not wrong


# --- points -----------------------------------------------------------------------------------------


def test_a_point_dragged_into_the_gap_closes_the_band(page: Page) -> None:
    before = band(page)
    page.drag(point(page, 7), place(page, 0.0, -0.2))
    settle(page)
    after = band(page)
    assert page.evaluate("document.querySelectorAll('#points input')[14].value") == "0"  # x of the eighth point
    assert after[0] < 0.5 * before[0]


def test_points_are_added_by_a_click_and_removed_by_two(page: Page) -> None:
    page.click(*place(page, 3.0, -1.5))
    settle(page)
    assert n_points(page) == N_START + 1
    assert "Point 17 of 17: x 3.00, y −1.50" in page.evaluate("document.getElementById('status').textContent")
    page.click(*point(page, N_START), times=2)
    settle(page)
    assert n_points(page) == N_START


def test_points_are_moved_added_and_removed_by_keyboard(page: Page) -> None:
    page.evaluate("document.querySelector('input[name=predictive]:checked').focus()")
    page.press("Tab")
    assert focused(page).startswith("Point 1 of 16: x −2.70")
    page.press("ArrowRight")
    page.press("ArrowUp", shift=True)
    assert focused(page).startswith("Point 1 of 16: x −2.65")
    page.press("PageDown")
    assert focused(page).startswith("Point 2 of 16")
    page.press("a")
    assert focused(page).startswith("Point 17 of 17")
    page.press("Delete")
    assert focused(page).startswith("Point 16 of 16")
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "remove"


def test_points_are_typed_as_numbers(page: Page) -> None:
    page.click(*page.centre("summary"))
    page.evaluate("(() => { const i = document.querySelector('#points input'); i.focus(); i.select(); })()")
    for key in "-1.9":
        page.press(key)
    settle(page)
    assert page.evaluate("document.querySelector('.point').getAttribute('aria-label')").startswith(
        "Point 1 of 16: x −1.90"
    )
    page.click(*page.centre("#points button", 2))
    assert n_points(page) == N_START - 1
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Remove point 3"


def test_a_finger_drags_taps_and_still_scrolls(browser: Chromium) -> None:
    with browser.open(PAGE.as_uri(), width=390, height=800, touch=True) as phone:
        settle(phone)
        before = band(phone)
        phone.touch_drag(point(phone, 7), place(phone, 0.0, -0.2))
        settle(phone)
        assert band(phone)[0] < 0.5 * before[0]
        x, y = place(phone, 3.2, 2.0)
        phone.tap(x, y)
        phone.wait_for(f"document.querySelectorAll('.point').length === {N_START + 1}")


def test_without_points_there_is_a_word_and_no_error(page: Page) -> None:
    for _ in range(N_START):
        page.click(*page.centre("#remove"))
    page.wait_for("document.getElementById('status').textContent.startsWith('There are no points')")
    assert page.evaluate("document.querySelector('.mean').getAttribute('d')") == ""
    page.click(*place(page, 0.0, 1.0))
    settle(page)
    assert 0 < band(page)[0] <= band(page)[3]  # one point is enough
    page.click(*page.centre("#reset"))
    settle(page)
    assert n_points(page) == N_START
    assert page.complaints == []


# --- settings ---------------------------------------------------------------------------------------


def test_the_prior_slider_moves_the_band_and_ends_the_automatic_choice(page: Page) -> None:
    page.centre("#precision")
    page.evaluate("document.getElementById('precision').focus()")
    best, before = number(page, "part-total"), band(page)
    for _ in range(4):
        page.press("PageDown")
    settle(page)
    assert not page.evaluate("document.getElementById('automatic').checked")
    assert band(page)[0] > 1.2 * before[0]
    assert number(page, "part-total") < best
    page.click(*page.centre("#automatic"))
    settle(page)
    assert number(page, "part-total") == pytest.approx(best, abs=0.011)


def test_more_noise_widens_the_band_at_the_data(page: Page) -> None:
    before = number(page, "score-linearised")
    page.evaluate("document.getElementById('noise').focus()")
    for _ in range(4):
        page.press("PageUp")
    settle(page)
    assert page.evaluate("window.playground.settings.noiseStd") > 0.15
    assert number(page, "score-linearised") < before


def test_sampled_weights_fit_worse_than_the_linearised_network(page: Page) -> None:
    mean = page.evaluate("document.querySelector('.mean').getAttribute('d')")
    assert number(page, "score-sampled") < number(page, "score-linearised") - 1
    choose(page, "predictive", "sampled")
    assert page.evaluate("document.querySelector('.mean').getAttribute('d')") != mean
    assert "sampled weights" in page.evaluate("document.getElementById('legend').textContent")
    choose(page, "predictive", "linearised")
    assert page.evaluate("document.querySelector('.mean').getAttribute('d')") == mean  # to the last digit


def test_structures_differ(page: Page) -> None:
    widths = {}
    for structure in ("full", "diag", "last_layer"):
        choose(page, "structure", structure)
        widths[structure] = (band(page)[0], page.evaluate("document.getElementById('effective').textContent"))
    assert len(set(widths.values())) == 3
    assert widths["last_layer"][1].endswith("of 11")


def test_the_link_takes_certainty_away_far_from_the_data(page: Page) -> None:
    choose(page, "task", "classes")
    assert n_points(page) == 30

    def sure() -> int:
        words = page.evaluate("document.getElementById('scene-text').textContent")
        return int(re.search(r"sure of a class on (\d+) %", words)[1])  # type: ignore[index]

    shares = {}
    for link in ("none", "mc", "pairwise", "probit", "bridge", "bridge_norm"):
        page.evaluate(
            f"(() => {{ const s = document.getElementById('link'); s.value = '{link}';"
            " s.dispatchEvent(new Event('change')); })()"
        )
        settle(page)
        shares[link] = sure()
    assert shares["none"] > 50 > 20 > shares["mc"]
    assert abs(shares["mc"] - shares["pairwise"]) < 10
    assert page.evaluate(N_COLOURS) > 100  # many shades, so a map was painted


def test_new_points_have_the_class_that_was_chosen(page: Page) -> None:
    choose(page, "task", "classes")
    page.click(*page.centre("input[name=label][value='2']"))
    page.click(*place(page, 3.0, 2.0))
    settle(page)
    assert page.evaluate("document.querySelectorAll('.point')[30].getAttribute('aria-label')").startswith(
        "Point 31 of 31, class C: x 3.00"
    )


def test_every_situation_worth_trying_settles_and_says_something(page: Page) -> None:
    said = set()
    for k in range(page.evaluate("document.querySelectorAll('#tries button').length")):
        page.click(*page.centre("#tries button", k))
        settle(page)
        said.add(page.evaluate("document.getElementById('scene-text').textContent"))
    assert len(said) >= 5
    assert page.complaints == []


N_COLOURS = """(() => {
  const map = document.getElementById('map');
  const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);
  return new Set(Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())).size;
})()"""

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
