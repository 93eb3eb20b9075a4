"""Open the page in headless Chromium: every figure has a size, and nothing is asked of the network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from chromium import QUIET, chromium
from demo_records import synthetic_record
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.page import write_page
from lapwing_studies.report.study import StudyPage, write_study
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

pytestmark = pytest.mark.browser

N_FIGURES = 1 + 6 + 3 + 3 + 2 + 2  # panels, and the two example digits of the synthetic record


def browse(page: Path, profile: Path, *options: str) -> str:
    command = [chromium(), *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(synthetic_record(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def opened(page: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The document after its script has run, and the browser's own log of network events."""
    log = tmp_path_factory.mktemp("log") / "net.json"
    options = ("--dump-dom", "--virtual-time-budget=3000", f"--log-net-log={log}", "--net-log-capture-mode=Everything")
    return browse(page, tmp_path_factory.mktemp("profile"), *options), log


def test_every_figure_is_drawn(opened: tuple[str, Path]) -> None:
    dom, _ = opened
    assert re.search(r'<html[^>]*\bdata-figures="(\d+)"', dom)[1] == str(N_FIGURES)  # type: ignore[index]


def test_the_script_ran_under_its_policy(opened: tuple[str, Path]) -> None:
    dom, _ = opened
    assert "chosen by the evidence" in dom
    hidden = re.findall(r'<g id="regression-total-(\d)" style="display: none;">', dom)
    assert hidden == ["0", "1", "3", "4"]


def test_nothing_is_fetched_and_nothing_had_to_be_refused(page: Path, opened: tuple[str, Path]) -> None:
    dom, log = opened
    assert 'data-fetched="0"' in dom
    assert 'data-refused="0"' in dom
    asked = set(re.findall(r'"url":"([^"]+)"', log.read_text(encoding="utf-8")))
    # The browser itself may mention its own services; the page's own requests would name it as initiator.
    initiated = re.findall(r'"initiator":"(file:[^"]*)"', log.read_text(encoding="utf-8"))
    assert not initiated
    assert {url for url in asked if url.startswith("file:")} <= {page.as_uri()}


@pytest.mark.parametrize("width", [400, 1200])
def test_it_paints_a_picture_on_a_phone_and_on_a_desk(page: Path, tmp_path: Path, width: int) -> None:
    shot = tmp_path / "page.png"
    browse(page, tmp_path / "profile", f"--window-size={width},900", f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000


def test_the_page_of_a_study_is_drawn_and_fetches_nothing(tmp_path: Path) -> None:
    figure = Figure("one", "A figure", "See.", (panel("one", "A line.", lambda ax: ax.plot([0, 1], [0, 1])),))
    table = Table("t", "A table", "See.", ("what", "how much"), ((Cell("a", "a"), Cell("1", 1.0)),))
    study = StudyPage("A study", ("Words.",), (figure,), (table,), headlines=(Headline("1", "one"),), command="lapwing")
    page = write_study(study, tmp_path / "report.html")
    dom = browse(page, tmp_path / "profile", "--dump-dom", "--virtual-time-budget=3000")
    assert 'data-figures="1"' in dom
    assert 'data-fetched="0"' in dom
    assert 'data-refused="0"' in dom
