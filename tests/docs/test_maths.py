"""Formulas of the pages: each becomes MathML, and the text around it stays as it was."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import markdown
import pytest

ROOT = Path(__file__).parents[2]
hook = runpy.run_path(str(ROOT / "tools" / "maths.py"))
OPTIONS = {"pymdownx.arithmatex": {"generic": True, "inline_syntax": ["dollar"], "block_syntax": ["dollar"]}}
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def rendered(text: str) -> str:
    extensions = ["tables", "pymdownx.arithmatex", "pymdownx.superfences"]
    return hook["on_page_content"](markdown.markdown(text, extensions=extensions, extension_configs=OPTIONS))


def formulas(html: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<math.*?</math>", html, re.DOTALL)]


def test_the_site_uses_these_options() -> None:
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert (
        "pymdownx.arithmatex:\n      generic: true\n      inline_syntax: [dollar]\n      block_syntax: [dollar]"
        in config
    )


def test_a_formula_in_a_line_and_one_of_its_own() -> None:
    html = rendered("Of $x_1 < 2$ and `$HOME`:\n\n$$ \\log \\det P $$\n")
    inline, block = formulas(html)
    assert (inline.get("display"), block.get("display")) == ("inline", "block")
    assert "".join(inline.itertext()) == "x1<2" and "<code>$HOME</code>" in html
    assert sum(element.tag.endswith("mspace") for element in block.iter()) == 2  # log det P, not logdetP


@pytest.mark.parametrize("latex", [r"\nosuchcommand x", r"\begin{aligned} a &= b \end{aligned}"])
def test_what_cannot_be_translated_stops_the_build(latex: str) -> None:
    with pytest.raises(ValueError, match="do not become MathML"):
        hook["mathml"](latex)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_formula_of_a_tutorial_is_translated(path: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    wanted = len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", text, re.DOTALL))
    html = rendered(path.read_text("utf-8"))
    assert len(formulas(html)) == wanted and "arithmatex" not in html
