r"""mkdocs hook: formulas in LaTeX, `$…$` and `$$…$$`, become MathML while the site is built.

Browsers and screen readers know MathML, so a page needs no script and no font from elsewhere. Markdown leaves a formula
alone and marks it (pymdownx.arithmatex); this replaces the marks. A formula that cannot be translated stops the build.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)

# A named function has a thin space on both sides, except next to a bracket or an operator.
_NAMED = r"<m[io][^>]*>(?:log|exp|det|max|min)</m[io]>"
_THIN = '<mspace width="0.17em" />'
_AFTER = re.compile(rf"({_NAMED})(?=<m(?:i|n|sub|sup|subsup|over|frac|style|o movablelimits)\b)")
_BEFORE = re.compile(rf"(</m(?:i|n|sub|sup|frac|style)>)(?={_NAMED})")


def on_page_content(content: str, **_: Any) -> str:
    """What mkdocs calls with the HTML of each page."""
    return _FORMULA.sub(lambda found: _marked(found["tag"], html.unescape(found["latex"])), content)


def mathml(latex: str, display: str = "inline") -> str:
    """The formula as a `<math>` element."""
    made = convert(latex.strip(), display=display)
    unknown = re.findall(r"\\[A-Za-z]+|>&<", made)
    if unknown:
        raise ValueError(f"The formula {latex.strip()!r} has parts that do not become MathML: {', '.join(unknown)}.")
    return _BEFORE.sub(rf"\1{_THIN}", _AFTER.sub(rf"\1{_THIN}", made))


def _marked(tag: str, latex: str) -> str:
    display = "block" if tag == "div" else "inline"
    return f'<{tag} class="maths">{mathml(latex, display)}</{tag}>'
