"""The tutorials: their order, their pictures, and what each page has."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tutorials"
INDEX = (FOLDER / "index.md").read_text("utf-8")
ORDER = re.findall(r"^\| \[\d+\. [^\]]+\]\(([\w-]+\.md)\)", INDEX, re.MULTILINE)


def text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def test_the_overview_has_every_page_in_the_order_of_the_navigation() -> None:
    assert re.findall(r": tutorials/([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)[1:] == ORDER
    assert sorted([*ORDER, "index.md"]) == sorted(page.name for page in FOLDER.glob("*.md"))


@pytest.mark.parametrize("name", ORDER)
def test_a_page_has_a_question_a_formula_code_with_a_check_and_a_picture(name: str) -> None:
    page = text(name)
    question = re.search(r"^# .+\n\n\*([^*]+\?)\*\n", page)
    assert question, "the question of the page comes first, in italics"
    assert re.search(r"^\$\$ .+ \$\$$", page, re.MULTILINE)
    assert "\nassert " in page or "testing.assert_close" in page
    assert re.search(r"!\[.{40,}\]\(\.\./assets/[\w-]+\.png\)", page)


@pytest.mark.parametrize(("name", "following"), list(pairwise(ORDER)))
def test_a_page_ends_with_the_way_to_the_next(name: str, following: str) -> None:
    assert re.search(rf"^Next: \[[^\]]+\]\({following}\)\.$", text(name).strip().splitlines()[-1])


def test_every_picture_is_drawn_by_the_command_and_shown() -> None:
    drawn = runpy.run_path(str(ROOT / "tools" / "tutorial_pictures.py"))["PICTURES"]
    assert sorted(f"tutorial-{name}.png" for name in drawn) == sorted(
        file.name for file in (ROOT / "docs" / "assets").glob("tutorial-*.png")
    )
    shown = "".join(map(text, ORDER))
    assert [name for name in drawn if f"(../assets/tutorial-{name}.png)" not in shown] == []
