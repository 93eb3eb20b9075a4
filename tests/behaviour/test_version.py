"""One version, written in three places."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

import lapwing as lw

ROOT = Path(__file__).parents[2]


def test_package_project_and_citation_agree_on_the_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert citation is not None
    assert lw.__version__ == project["version"] == citation[1]
