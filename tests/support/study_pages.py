"""The page and the picture of a study's record, written as the command writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lapwing_studies.report.study import StudyPage, study_page, write_cover, write_study
from lapwing_studies.reproduce.registry import entry


def page_of(study: str, record: Any) -> StudyPage:
    return study_page(entry(study), record, f"lapwing reproduce {study}")


def written(study: str, record: Any, folder: Path) -> str:
    """The page's HTML; its picture is written as well, and is not empty."""
    page = page_of(study, record)
    assert write_cover(page, folder / "picture.png").stat().st_size > 5000
    return write_study(page, folder / "report.html").read_text(encoding="utf-8")
