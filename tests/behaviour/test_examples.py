"""The scripts in examples/ run, quietly and in seconds, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _global_state_kept():
    """A script seeds torch's global generator; other tests should not notice."""
    with torch.random.fork_rng(devices=[]):
        yield


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_example_runs(path: Path, capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr()
    assert printed.out.strip() and not printed.err


def test_the_regression_doubts_the_gap():
    names = runpy.run_path(str(EXAMPLES[0].with_name("quickstart_regression.py")))
    prediction = names["posterior"].predict(torch.tensor([[0.0], [-2.0]]))
    assert prediction.epistemic[0] > 10 * prediction.epistemic[1]


def test_the_classifier_gains_by_its_error_bars():
    names = runpy.run_path(str(EXAMPLES[0].with_name("quickstart_classification.py")))
    assert names["ours"] < names["plain"]
