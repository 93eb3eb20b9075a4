"""Reading order is dependency order: a module imports only from lines above its own.

The imports are read, not run, so an import inside a function or under TYPE_CHECKING counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lapwing"

ORDER = [
    "errors",
    "_types",
    "metrics",
    "runtime",
    "linalg",
    "operators",
    "likelihoods",
    "data",
    "network",
    "priors",
    "curvature",
    "linear_model",
    "subnetwork",
    "predictive",
    "planning",
    "posterior",
    "tuning",
    "refinement",
    "calibration",
    "storage",
    "api",
    "train",
    "cli",
    "bench",
]
LINE = {module: line for line, module in enumerate(ORDER)}

FRONT_DOOR = "lapwing"  # the package itself, `import lapwing`: its public names

# Narrower than the order: these may import what is named, and nothing else of ours.
ONLY = {
    "linalg": {"errors", "_types"},
    "operators": {"errors", "_types", "linalg"},
    "likelihoods": {"errors", "_types"},
    "metrics": {"errors", "_types"},
}
MAY_USE_THE_FRONT_DOOR = {"cli"}


@dataclass(frozen=True)
class Arrow:
    """`importer` imports `imported`; both are top-level modules of the package, or the package itself."""

    importer: str
    imported: str
    place: str


def arrows(package: Path) -> list[Arrow]:
    """Every import of one top-level module by another, in the order the files are read."""
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    found = []
    for path in sorted(package.rglob("*.py")):
        importer = path.relative_to(package).parts[0].removesuffix(".py")
        if importer == "__init__":
            continue
        for line, name in imported_names(path, package):
            imported = top_level(name, modules)
            if imported and imported != importer:
                found.append(Arrow(importer, imported, f"{path.relative_to(package)}:{line}"))
    return found


def imported_names(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, relative ones resolved."""
    parents = [package.name, *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def top_level(name: str, modules: set[str]) -> str | None:
    """'lapwing.operators.dense.DenseCurvature' → 'operators'; 'lapwing.Gaussian' → 'lapwing', the front door."""
    root, *rest = name.split(".")
    if root != FRONT_DOOR:
        return None
    return rest[0] if rest and rest[0] in modules else FRONT_DOOR


def complaints(found: list[Arrow]) -> list[str]:
    return [f"{arrow.place}: {words}" for arrow in found if (words := complaint(arrow))]


def complaint(arrow: Arrow) -> str | None:
    a, b = arrow.importer, arrow.imported
    if a in ONLY and b not in ONLY[a]:
        return f"{a} → {b}: {a} may import {', '.join(sorted(ONLY[a])) or 'nothing of lapwing'} only"
    if b == FRONT_DOOR:
        return None if a in MAY_USE_THE_FRONT_DOOR else f"{a} imports the public package, which stands above it"
    unknown = {a, b} - set(LINE)
    if unknown:
        return f"{unknown.pop()} has no place in ORDER yet"
    if LINE[b] > LINE[a]:
        return f"{a} → {b} points back: {b} comes after {a}"
    return None


def test_no_arrow_points_back():
    found = complaints(arrows(PACKAGE))
    assert not found, "the first arrow that points back is " + found[0]


def test_every_module_has_a_place():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} <= set(LINE)


def test_there_is_no_utils():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "misc"}]


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
    assert complaints(arrows(plant(tmp_path, files))) == []
