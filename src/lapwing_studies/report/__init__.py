"""Render records as tables, figures and pages. Reads plain JSON records, not objects of the library."""

from __future__ import annotations

from importlib.util import find_spec

from lapwing.errors import MissingExtraError

for _package in ("matplotlib", "jinja2"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "studies")
