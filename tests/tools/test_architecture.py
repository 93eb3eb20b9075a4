"""Reading order is dependency order: a module imports only from lines above its own, and modules form no circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from package_map import BEGIN, LINE, PACKAGE, PAGES, arrows, complaints, cycle, package_map, with_map


def test_no_arrow_points_back():
    found = complaints(arrows(PACKAGE))
    assert not found, "the first arrow that points back is " + found[0]


def test_modules_import_each_other_in_no_circle():
    assert cycle(arrows(PACKAGE)) == []


def test_every_module_has_a_place():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set(LINE)


def test_there_is_no_utils():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "misc"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_map_of_the_package_is_that_of_the_code(page: Path):
    text = page.read_text(encoding="utf-8")
    assert BEGIN in text and package_map() in text, f"{page.name} is stale: run python tools/package_map.py"
    assert with_map(text) == text


def plant(tmp_path: Path, files: dict[str, str]) -> Path:
    package = tmp_path / "lapwing"
    for module in LINE:
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    return package


PLANTED = [
    ({"linalg/x.py": "from lapwing.api.fit import fit"}, "linalg → api"),
    ({"operators/x.py": "from lapwing import curvature"}, "operators → curvature"),
    ({"priors/x.py": "from ..posterior import Posterior"}, "priors → posterior points back"),
    ({"curvature/x.py": "def late():\n    import lapwing.tuning as t"}, "curvature → tuning points back"),
    ({"tuning/x.py": "import lapwing as lw"}, "tuning imports the public package"),
]


@pytest.mark.parametrize(("files", "expected"), PLANTED, ids=[expected for _, expected in PLANTED])
def test_a_planted_arrow_is_caught(tmp_path: Path, files: dict[str, str], expected: str):
    found = complaints(arrows(plant(tmp_path, files)))
    assert found and expected in found[0]


def test_arrows_that_point_forward_are_left_alone(tmp_path: Path):
    files = {
        "operators/x.py": "from ..linalg import cg\nfrom .y import z\nimport torch",
        "operators/y.py": "from lapwing.errors import ShapeError\nz = 1",
        "posterior/x.py": "from lapwing.predictive.links import probit",
        "cli/x.py": "import lapwing as lw\nfrom lapwing_studies.report.page import write",
    }
    found = arrows(plant(tmp_path, files))
    assert complaints(found) == [] and cycle(found) == []


def test_a_planted_circle_is_caught(tmp_path: Path):
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lapwing.operators.x import X\n"
    files = {"operators/x.py": "from .y import z", "operators/y.py": "from lapwing.operators.w import z"}
    assert cycle(arrows(plant(tmp_path, {**files, "operators/w.py": hidden}))) == [
        "lapwing.operators.w",
        "lapwing.operators.x",
        "lapwing.operators.y",
        "lapwing.operators.w",
    ]
