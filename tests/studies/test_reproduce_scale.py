"""Preconditioners and products: counts of iterations, and their pages at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lapwing.operators import DiagonalCurvature, GroupedDiagonal
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce import preconditioners, registry
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from study_pages import page_of, written


def test_iterations_are_as_many_as_there_are_different_eigenvalues() -> None:
    values = torch.tensor([1.0, 1.0, 5.0, 5.0, 9.0], dtype=torch.float64)
    truth = torch.ones(5, dtype=torch.float64)
    assert preconditioners.iterations(values.diag(), truth, None) == 3
    exact = DiagonalCurvature(values - 0.5).plus(GroupedDiagonal(values.new_full((1,), 0.5), torch.zeros(5).long()))
    assert preconditioners.iterations(values.diag(), truth, exact) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("study", "tables"), [("preconditioners", 3), ("product-cost", 1), ("fisher", 2)])
def test_the_pages_can_be_made(study: str, tables: int, tmp_path: Path) -> None:
    record = registry.entry(study).study.run(Study(DataFolder(None), Store(tmp_path), TOY, n_seeds=1))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    page = page_of(study, record)
    panels = sum(len(figure.panels) for figure in page.figures)
    assert written(study, record, tmp_path).count('role="img"') == panels >= 2
    assert len(page.tables) == 1 + tables and all(len(markdown(t).splitlines()) > 2 for t in page.tables)
