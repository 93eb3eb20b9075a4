"""`python -m tools.mutants`, from the root of the project: seeded mutants, the tests that kill them, and a table.

What is found goes to a folder as it is found; work that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from .session import MutantSession

PROJECT = Path(__file__).parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--folder", type=Path, default=PROJECT / "mutants-results")
    parser.add_argument("-n", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tests", nargs="*", default=[str(PROJECT / "tests")], help="test files; by default all")
    args = parser.parse_args()
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(args.folder / "hypothesis")
    options = ["-s", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist", f"--rootdir={PROJECT}"]
    return pytest.main([*options, *args.tests], plugins=[MutantSession(args.folder, args.n, args.seed)])


if __name__ == "__main__":
    sys.exit(main())
