"""mkdocs hook: link the first use of each glossary term on a page to its entry, with the definition as a tooltip.

The terms are the `###` headings of docs/glossary.md, with the other names of their "*Also:*" line; the definition is
the first paragraph. Links that a page has already are kept, and nothing is changed in code, formulas, headings,
links and HTML.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

GLOSSARY = Path(__file__).parent.parent / "docs" / "glossary.md"

# What is left alone: code, formulas, headings, comments and tags, images and links, and words that mean something else.
_PROTECTED = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$"
    r"|^(?: {4}|\t)[^\n]*$"
    r"|^#{1,6} [^\n]*$"
    r"|^::: [^\n]*$"
    r"|^\[[^\]]+\]:[^\n]*$"
    r"|`+[^`\n]+`+"
    r"|\$\$.*?\$\$|\$[^$\n]+\$"
    r"|<!--.*?-->"
    r"|<[^>\n]+>"
    r"|!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?:[^()\"]|\"[^\"]*\")*\)"
    r"|(?:half|single|double|floating-point)\s+precision|precision of what",  # of numbers, not of a Gaussian
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Term:
    """One entry: the names it goes by, its anchor and its definition."""

    names: tuple[str, ...]
    anchor: str
    definition: str

    def pattern(self) -> re.Pattern[str]:
        """Any of the names as whole words, also in the plural or broken over two lines; acronyms in capitals only."""
        return _any_of(self.names)


def terms(glossary: str) -> list[Term]:
    """The entries of the glossary page."""
    found = []
    for entry in re.split(r"^### ", glossary, flags=re.MULTILINE)[1:]:
        heading, _, body = entry.partition("\n")
        paragraphs = [" ".join(part.split()) for part in body.strip().split("\n\n")]
        also = [part.removeprefix("*Also:*") for part in paragraphs if part.startswith("*Also:*")]
        names = (heading.strip(), *(name.strip() for line in also for name in line.split(",")))
        found.append(Term(names, anchor(heading), _plain(paragraphs[0])))
    return found


def anchor(heading: str) -> str:
    """The id that mkdocs gives a heading of the glossary."""
    letters = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", letters).strip().lower())


def link_first_uses(markdown: str, entries: list[Term], glossary: str) -> str:
    """The page with the first use of every term linked, unless it has a link to that entry already.

    `glossary` is the address of the glossary page relative to this page. Of names that start at the same place the
    longest counts, so that the "likelihood" in "marginal likelihood" is no use of "likelihood".
    """
    protected = [match.span() for match in _PROTECTED.finditer(markdown)]
    there = set(re.findall(rf"\({re.escape(glossary)}#([\w-]+)", markdown))
    missing = {entry: f"{glossary}#{entry.anchor}" for entry in entries if entry.anchor not in there}
    linked, end = [], 0
    for match in _any_of(tuple(name for entry in entries for name in entry.names)).finditer(markdown):
        used = next(entry for entry in entries if entry.pattern().fullmatch(match[0]))
        free = not any(start < match.end() and match.start() < stop for start, stop in protected)
        if free and used in missing:
            linked += [markdown[end : match.start()], f'[{match[0]}]({missing.pop(used)} "{used.definition}")']
            end = match.end()
    return "".join([*linked, markdown[end:]])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What mkdocs calls for each page."""
    path = PurePosixPath(page.file.src_uri)
    if path.name == GLOSSARY.name:
        return markdown
    return link_first_uses(markdown, terms(GLOSSARY.read_text("utf-8")), "../" * (len(path.parts) - 1) + GLOSSARY.name)


@cache
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(_spelled(name) for name in sorted(names, key=len, reverse=True)))


def _spelled(name: str) -> str:
    words = r"\s+".join(re.escape(word).replace("–", "[-–]") for word in name.split())
    whole = rf"(?<![\w-]){words}s?(?![\w-])"
    return whole if name.isupper() else f"(?i:{whole})"


def _plain(markdown: str) -> str:
    """Without links, escapes, emphasis and quotes, as a tooltip shows it; a bar would end the cell of a table."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"[\\`*]", "", text).replace('"', "'").replace("|", "∣")
