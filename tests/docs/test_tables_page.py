"""The table of the scikit-learn page is that of the record of examples/long/tables.py."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "examples" / "long" / "tables.py"))
RECORD = json.loads(TABLES["RECORD"].read_text("utf-8"))


def test_the_page_has_the_table_of_the_record():
    page = (ROOT / "docs" / "sklearn.md").read_text("utf-8")
    assert "\n".join(TABLES["table"](RECORD)).strip() in page, "put in what `examples/long/tables.py --table` prints"


def test_means_are_over_the_splits_that_all_have_and_the_best_is_bold():
    record = {f"yacht/{m}/{k}": v + k for m, v in zip(TABLES["COLUMNS"], (1.0, 2.0, 0.5, 1.0)) for k in range(2)}
    lines = "\n".join(TABLES["table"](record)).splitlines()
    assert lines[2] == "| yacht (2 of 5 splits) | 1.500 ± 0.500 | 2.500 ± 0.500 | **1.000** ± 0.500 | 1.500 ± 0.500 |"
    assert lines[3] == "| at least as good | | on 1 of 8 | on 0 of 8 | on 1 of 8 |"
    del record["yacht/gp/1"]
    assert "| yacht (1 of 5 splits) | 1.000 | 2.000 | **0.500** | 1.000 |" in "\n".join(TABLES["table"](record))


@pytest.mark.parametrize("name", ["wine", "glass"])
def test_a_method_gives_a_finite_score(name: str):
    """On rows of the test's own: the data sets are not part of the repository."""
    import numpy as np

    random = np.random.RandomState(0)
    X = random.randn(90, 3)
    y = X[:, 0] + 0.1 * random.randn(90) if name == "wine" else (X[:, 0] > 0).astype(int) + (X[:, 1] > 1)
    methods = TABLES["REGRESSORS" if name == "wine" else "CLASSIFIERS"]
    for method in ("gp", "mlp", "boosting"):
        assert np.isfinite(methods[method](X[:70], y[:70], X[70:], y[70:], 0))
