"""Deprecated name: `python -m lapwing.bench.case` is `python -m lapwing_studies.bench.case`."""
