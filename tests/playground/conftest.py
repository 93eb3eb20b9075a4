"""One browser for all tests of the playground, and a tab of it for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chromium import Chromium, Page
from playground_page import PAGE, settle


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    with browser.open(PAGE.as_uri()) as opened:
        settle(opened)
        yield opened
