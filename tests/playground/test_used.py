"""The playground as it is shipped, in Chromium: its numbers, and its use by mouse, finger and keyboard."""

from __future__ import annotations

import json
import re

import pytest

from chromium import Chromium, Page
from playground_page import CASES, N_START, PAGE, band, choose, focused, n_points, number, place, point, settle

pytestmark = pytest.mark.browser


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


N_COLOURS = """(() => {
  const map = document.getElementById('map');
  const { data } = map.getContext('2d').getImageData(0, 0, map.width, map.height);
  return new Set(Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())).size;
})()"""


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
