"""mkdocs hook: name the theme's buttons that are only pictures, for screen readers and as tooltips."""

from __future__ import annotations

import re
from typing import Any

NAMES = {"__drawer": "Pages", "__search": "Search"}
_UNNAMED = re.compile(r'<label class="([^"]*md-icon[^"]*)" for="(__drawer|__search)">')


def on_post_page(output: str, **_: Any) -> str:
    """What mkdocs calls with each finished page."""
    return _UNNAMED.sub(lambda found: f'<label class="{found[1]}" for="{found[2]}" title="{NAMES[found[2]]}">', output)
