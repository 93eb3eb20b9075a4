"""Preconditioners and products: counts of iterations, and their pages at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lapwing.operators import DiagonalCurvature, GroupedDiagonal
from lapwing_studies.report import fisher as fisher_report
from lapwing_studies.report import preconditioners as preconditioners_report
from lapwing_studies.report import product_cost as product_cost_report
from lapwing_studies.report.study import markdown, write_study
from lapwing_studies.reproduce import fisher, preconditioners, product_cost
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study


def test_iterations_are_as_many_as_there_are_different_eigenvalues() -> None:
    values = torch.tensor([1.0, 1.0, 5.0, 5.0, 9.0], dtype=torch.float64)
    truth = torch.ones(5, dtype=torch.float64)
    assert preconditioners.iterations(values.diag(), truth, None) == 3
    exact = DiagonalCurvature(values - 0.5).plus(GroupedDiagonal(values.new_full((1,), 0.5), torch.zeros(5).long()))
    assert preconditioners.iterations(values.diag(), truth, exact) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "report", "tables"),
    [
        (preconditioners, preconditioners_report, 3),
        (product_cost, product_cost_report, 1),
        (fisher, fisher_report, 2),
    ],
    ids=["preconditioners", "product-cost", "fisher"],
)
def test_the_pages_can_be_made(bench, report, tables: int, tmp_path: Path) -> None:
    record = bench.run(Study(DataFolder(None), Store(tmp_path), TOY, n_seeds=1))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    page = report.page(record, "lapwing reproduce")
    panels = sum(len(figure.panels) for figure in page.figures)
    assert write_study(page, tmp_path / "report.html").read_text().count('role="img"') == panels >= 2
    assert report.picture(record, tmp_path / "picture.png").stat().st_size > 5000
    assert len(page.tables) == tables and all(len(markdown(t).splitlines()) > 2 for t in page.tables)
