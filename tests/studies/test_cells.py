"""Cells, means and the legend of pictures, which all studies share."""

from __future__ import annotations

import pytest

from lapwing_studies.report import cells
from lapwing_studies.report.figures import Key
from lapwing_studies.report.palette import GLM, INK, MAP
from lapwing_studies.report.study import _handle, markdown
from lapwing_studies.reproduce.claims import above, at_least, below, every
from lapwing_studies.reproduce.means import grouped, mean_of, standard_error, where


def test_a_mean_has_its_standard_error() -> None:
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(3**-0.5)
    assert standard_error([5.0]) == 0
    assert cells.mean([1.0, 2.0, 3.0], "{:.2f}").text == "2.00 ± 0.58"
    assert cells.mean([2.0], "{:+.1f}").text == "+2.0" and cells.mean([]).text == ""
    assert cells.mean([1.0, 3.0], "{:+.1f}").text == "+2.0 ± 1.0"


def test_the_best_is_marked_with_what_prints_the_same() -> None:
    row = [cells.number(v, "{:.2f}") for v in (0.501, 0.499, 0.7)] + [cells.number(None)]
    assert [cell.mark for cell in cells.best(row)] == ["best", "best", "", ""]
    assert [cell.mark for cell in cells.best(row, -1)] == ["", "", "best", ""]
    assert cells.best([cells.number(None)])[0].mark == ""


def test_the_best_of_columns_and_the_table_in_markdown() -> None:
    rows = [["a", cells.number(1.0), cells.number(3.0)], ["b", cells.number(2.0), cells.number(4.0)]]
    made = cells.table("t", "Title", "See.", ("what", "less", "more"), cells.best_of_columns(rows, {1: 1, 2: -1}))
    assert markdown(made).splitlines() == [
        "| what | less | more |",
        "| --- | ---: | ---: |",
        "| a | **1.000** | 3.000 |",
        "| b | 2.000 | **4.000** |",
    ]


def test_records_are_grouped_and_found() -> None:
    rows = [{"a": 1, "b": "x", "v": 2.0}, {"a": 1, "b": "y", "v": 4.0}, {"a": 2, "b": "x", "v": 6.0}]
    assert {key: len(some) for key, some in grouped(rows, "a").items()} == {1: 2, 2: 1}
    assert list(grouped(rows, "a", "b")) == [(1, "x"), (1, "y"), (2, "x")]
    assert where(rows, a=1, b="y") == rows[1:2] and mean_of(where(rows, b="x"), "v") == 4


def test_claims_in_words_and_verdicts() -> None:
    assert (below("says", 1, 2).verdict, above("says", 1, 2).verdict) == ("holds", "does not hold")
    assert below("says", 1, 2, shown="{:.1f}").found == "1.0 against 2.0"
    assert every("says", [True, False]).verdict == "does not hold" and every("says", []).verdict == "not testable here"
    assert at_least("says", 2, [True, True, False]).wanted == "≥ 2 of 3"
    assert at_least("says", 4, [True]).holds is None


def test_the_pictures_legend_looks_like_the_pages() -> None:
    dot, line, dash = (_handle(Key("words", look)) for look in ("dot map", "line glm thin", "dash"))
    assert (dot.get_color(), dot.get_marker(), dot.get_label()) == (MAP, "o", "words")
    assert (line.get_color(), dash.get_color(), dash.get_linestyle()) == (GLM, INK, "--")
