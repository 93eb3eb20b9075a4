"""The results page is made from its records, and a study's page has the figures of its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import results_page
from lapwing_studies.reproduce import registry
from lapwing_studies.reproduce.claims import FAILS, HOLDS, KeptClaims

RECORDS = results_page.records()


def test_the_page_is_that_of_the_records() -> None:
    assert results_page.PAGE.read_text("utf-8") == results_page.page(RECORDS), "run python tools/results_page.py"


def test_every_study_has_a_record() -> None:
    assert [record["study"] for record in RECORDS] == registry.names()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["study"])
def test_the_claims_on_the_page_of_a_study_are_those_of_its_record(record: KeptClaims) -> None:
    text = (results_page.DOCS / results_page.page_of(record)).read_text("utf-8")
    assert text == results_page.with_claims(text, record), "run python tools/results_page.py"


def test_a_planted_mistake_is_found_on_the_page_of_a_study() -> None:
    record = next(record for record in RECORDS if record["study"] == "step")
    text = (results_page.DOCS / results_page.page_of(record)).read_text("utf-8")
    measured = record["claims"][0]["measured"]
    assert results_page.with_claims(text.replace(measured, "0.123; exact 0.992"), record) == text
    with pytest.raises(ValueError, match="needs the lines"):
        results_page.with_claims("# A page without a place for claims", record)


def test_tables_of_a_page_are_replaced_by_those_with_the_same_columns() -> None:
    page = "# Page\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n\nWords.\n\n| c |\n| --- |\n| y |\n"
    newer = "Title\n\n| a | b |\n| --- | ---: |\n| x | 2 |\n| z | 3 |\n\nOther\n\n| d |\n| --- |\n| 9 |\n"
    found = results_page.with_tables(page, newer)
    assert found == page.replace("| x | 1 |\n", "| x | 2 |\n| z | 3 |\n")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["study"])
def test_a_record_is_that_of_its_study(record: KeptClaims) -> None:
    entry = registry.entry(record["study"])
    assert record["paper"] == entry.paper and record["tier"] in entry.tiers
    assert f"lapwing reproduce {entry.name}" in record["command"] and record["claims"]


def test_a_changed_record_changes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    record = json.loads((results_page.RECORDS / "step.json").read_text("utf-8"))
    record["claims"][0]["verdict"] = FAILS if record["claims"][0]["verdict"] == HOLDS else HOLDS
    path.write_text(json.dumps(record), encoding="utf-8")
    assert results_page.page(results_page.records(tmp_path)) not in results_page.PAGE.read_text("utf-8")


@pytest.mark.parametrize("change", [{"verdict": "maybe"}, {"seen": "1"}])
def test_records_of_another_form_are_refused(change: dict[str, str], tmp_path: Path) -> None:
    record = json.loads((results_page.RECORDS / "step.json").read_text("utf-8"))
    record["claims"][0].update(change)
    (tmp_path / "step.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=r"step\.json"):
        results_page.records(tmp_path)
