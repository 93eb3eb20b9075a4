"""Kept for one release; use `python -m lapwing_studies.bench.case`."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    print("lapwing.bench.case is deprecated: use python -m lapwing_studies.bench.case", file=sys.stderr)
    import_module("lapwing_studies.bench.case").main(*sys.argv[1:])
