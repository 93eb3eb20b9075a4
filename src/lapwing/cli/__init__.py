"""The command line: parse arguments, call public functions and studies."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from lapwing.errors import MissingExtraError

_PACKAGES = ("typer", "rich")  # in the extra "studies"; the library itself does not need them


def main() -> None:
    """The command `lapwing`."""
    missing = next((package for package in _PACKAGES if find_spec(package) is None), None)
    if missing is not None:
        sys.exit(str(MissingExtraError(missing, "studies")))
    from lapwing.cli.app import app

    app()
