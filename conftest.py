"""Runs the ```python examples of README.md and docs/ as tests; the examples of one page share a namespace.

A page is run in an empty directory, where its examples may leave files. Pages that need the libraries of adapters run
where those are known to be there: `make test-adapters`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


def _enter(namespace: dict[str, Any]) -> None:
    namespace["_left"] = left = ExitStack()
    directory = left.enter_context(TemporaryDirectory())
    left.callback(os.chdir, os.getcwd())  # before the directory goes
    os.chdir(directory)


def _leave(namespace: dict[str, Any]) -> None:
    namespace["_left"].close()


_OF_ADAPTERS = [
    "docs/lightning.md",
    "docs/hugging-face.md",
    "docs/botorch.md",
    "docs/export.md",
    "docs/tutorials/lora.md",
]

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["docs/*.md", "docs/tutorials/*.md", "docs/decisions/*.md", "README.md"],
    excludes=[] if os.environ.get("LAPWING_ADAPTERS") else _OF_ADAPTERS,
    setup=_enter,
    teardown=_leave,
).pytest()
