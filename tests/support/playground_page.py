"""The playground in a tab: where its points are, and what it says."""

from __future__ import annotations

import re
from pathlib import Path

from chromium import Page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "playground" / "page.html"
CASES = ROOT / "playground" / "tests" / "cases.json"
SETTLED = "document.documentElement.dataset.state === 'settled'"
N_START = 16  # points of the regression


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
