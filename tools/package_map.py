"""The order of the package: what may import what, and the map of it in CONTRIBUTING.md and docs/how-it-works.md.

`python tools/package_map.py` writes the map between its markers; a test fails when it is stale.
Imports are read from the source, not run, so an import inside a function or under TYPE_CHECKING counts as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "src" / "lapwing"
PAGES = (PROJECT / "CONTRIBUTING.md", PROJECT / "docs" / "how-it-works.md")
BEGIN, END = "<!-- package map: made by tools/package_map.py -->", "<!-- end of package map -->"

# A module imports only from lines above its own.
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
    "acquisition",
    "storage",
    "imaging",
    "api",
    "train",
    "integrations",
    "sklearn",
    "lightning",
    "transformers",
    "botorch",
    "compat",
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
    """The module `importer` imports the module `imported`, both by their dotted names."""

    importer: str
    imported: str
    place: str

    @property
    def packages(self) -> tuple[str, str]:
        """The entries at the top of the package that both belong to."""
        return entry(self.importer), entry(self.imported)


def entry(name: str) -> str:
    """'lapwing.operators.dense' → 'operators'; 'lapwing' → 'lapwing', the front door."""
    _, *rest = name.split(".")
    return rest[0] if rest else FRONT_DOOR


def arrows(package: Path) -> list[Arrow]:
    """Every import of one of our modules by another, in the order the files are read; without the front door's own."""
    files = {dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    found = []
    for importer, path in files.items():
        if importer == FRONT_DOOR:
            continue
        for line, name in imported_names(path, package):
            imported = module_of(name, files)
            if imported is not None and imported != importer:
                found.append(Arrow(importer, imported, f"{path.relative_to(package)}:{line}"))
    return found


def dotted(path: Path, package: Path) -> str:
    """A file's module name; a package is its `__init__.py`."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def module_of(name: str, modules: Iterable[str]) -> str | None:
    """'lapwing.operators.dense.DenseCurvature' → 'lapwing.operators.dense'; None for other libraries."""
    parts = name.split(".")
    if parts[0] != FRONT_DOOR:
        return None
    known = set(modules)
    return next(found for k in range(len(parts), 0, -1) if (found := ".".join(parts[:k])) in known or k == 1)


def complaints(found: list[Arrow]) -> list[str]:
    return [f"{arrow.place}: {words}" for arrow in found if (words := complaint(arrow))]


def complaint(arrow: Arrow) -> str | None:
    a, b = arrow.packages
    if a == b:
        return None
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


def cycle(found: list[Arrow]) -> list[str]:
    """Modules that import each other in a circle, the first of them again at the end; empty where there is none."""
    imports: dict[str, list[str]] = {}
    for arrow in found:
        imports.setdefault(arrow.importer, []).append(arrow.imported)
    done: set[str] = set()
    for start in imports:
        around = _circle(start, imports, done, [])
        if around:
            return around
    return []


def _circle(module: str, imports: dict[str, list[str]], done: set[str], path: list[str]) -> list[str]:
    """Depth first along the imports."""
    if module in path:
        return [*path[path.index(module) :], module]
    if module in done:
        return []
    for imported in imports.get(module, []):
        around = _circle(imported, imports, done, [*path, module])
        if around:
            return around
    done.add(module)
    return []


def package_map(package: Path = PACKAGE) -> str:
    """One line per entry, top to bottom as data flow: its name, and the first sentence of its docstring."""
    rows = [(f"{name}/" if (package / name).is_dir() else f"{name}.py", _summary(package / name)) for name in ORDER]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["    src/lapwing/", *(f"      {name:<{width}}{words}" for name, words in rows)])


def _summary(path: Path) -> str:
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    words = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return words.split("\n")[0].removesuffix(".")


def with_map(text: str) -> str:
    """A page with the map as it should be."""
    block = f"{BEGIN}\n\n{package_map()}\n\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(with_map(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
