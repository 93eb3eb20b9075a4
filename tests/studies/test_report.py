"""Figures, tables and page from a synthetic record: no network is trained, no browser is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from demo_records import synthetic_record
from lapwing_studies.report import figures, tables
from lapwing_studies.report.page import headlines, render, write_page
from lapwing_studies.report.palette import DARK, LIGHT

PANELS = {"regression": 1, "moons": 6, "reliability": 3, "entropy": 3, "evidence": 2}


@pytest.fixture(scope="module")
def page() -> str:
    return render(synthetic_record())


@pytest.fixture(scope="module")
def drawn() -> dict[str, figures.Figure]:
    return figures.all_figures(synthetic_record())


@pytest.mark.parametrize("name", PANELS)
def test_every_figure_is_well_formed_named_and_explained(drawn: dict[str, figures.Figure], name: str) -> None:
    figure = drawn[name]
    assert len(figure.panels) == PANELS[name]
    assert figure.see.endswith((".", ")."))
    for svg in figure.panels:
        element = ElementTree.fromstring(svg)
        assert element.attrib["role"] == "img"
        assert element.attrib["aria-labelledby"]
        assert element[0].tag.endswith("title")
        assert "width" not in element.attrib


def test_figures_follow_the_theme(drawn: dict[str, figures.Figure]) -> None:
    svgs = "".join(svg for figure in drawn.values() for svg in figure.panels)
    assert "var(--glm)" in svgs
    assert not [colour for colour in LIGHT.values() if colour in svgs]
    assert LIGHT.keys() == DARK.keys()


def test_no_id_is_used_twice_and_every_reference_resolves(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page)
    labels = re.findall(r'aria-labelledby="([^"]+)"', page) + re.findall(r'\bfor="([^"]+)"', page)
    assert references
    assert set(references + labels) <= set(ids)


def test_the_page_asks_the_network_for_nothing(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    for target in re.findall(r"""(?:src|href)=["']([^"']*)""", page) + re.findall(r"url\(([^)]*)\)", page):
        assert target.startswith(("#", "data:")), target
    assert "@import" not in page


def test_the_policy_allows_exactly_the_script_on_the_page(page: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert not re.search(r"\son\w+=", page)


def test_words_of_a_record_are_escaped(page: str) -> None:
    assert "full &lt;GGN&gt; &amp; prior" in page


def test_a_record_survives_json_and_gives_the_same_page_again(page: str, tmp_path: Path) -> None:
    path = write_page(json.loads(json.dumps(synthetic_record())), tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == page


def test_tables_mark_the_best_score_of_each_column() -> None:
    table = tables.digits(synthetic_record()["digits"])
    marked = [[cell.mark for cell in row] for row in table.rows]
    nll = table.columns.index("NLL ↓")
    assert [row[nll] for row in marked] == ["best", "", "", "", ""]
    assert table.rows[0][2].text == "–"


def test_the_digits_table_says_when_the_evidence_costs_nll_and_only_then() -> None:
    record = synthetic_record()["digits"]
    assert "2.300 against 0.300" in tables.digits(record).see
    record["rows"][2]["nll"] = 0.2
    assert "better NLL" in tables.digits(record).see


def test_an_image_without_a_label_is_called_a_photograph(page: str) -> None:
    assert "digit 3</span>" in page
    assert "photograph</span>" in page


def test_regression_table_compares_within_a_place() -> None:
    table = tables.regression(synthetic_record()["regression"])
    rmse = table.columns.index("RMSE ↓")
    assert [row[rmse].mark for row in table.rows] == ["best", "", "", "best", "", ""]


def test_headlines_state_what_the_record_holds() -> None:
    record = synthetic_record()
    record["regression"]["rows"][1]["coverage"] = 0.123
    assert headlines(record)[0].value.startswith("12.3% → ")
