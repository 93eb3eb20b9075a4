"""Runs the ```python examples of README.md and docs/ as tests; the examples of one page share a namespace."""

from __future__ import annotations

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["docs/*.md", "docs/decisions/*.md", "README.md"],
).pytest()
