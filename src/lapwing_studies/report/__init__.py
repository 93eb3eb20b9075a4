"""Records → tables, figures, page. Reads plain JSON records, never the library's own objects."""

from __future__ import annotations

from importlib.util import find_spec

from lapwing.errors import MissingExtraError

for _package in ("matplotlib", "jinja2"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "studies")
