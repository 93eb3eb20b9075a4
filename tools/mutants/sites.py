"""Places in the numerical core where a mistake can be planted, a seeded choice of them, and the planting."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .counts import Counts, whole_attributes
from .kinds import changes

CORE = (
    *("linalg", "operators", "likelihoods", "network/jacobian", "network/layers", "network/linearised.py"),
    *("network/products", "priors", "curvature", "linear_model", "predictive"),
    *("posterior/evidence.py", "posterior/sampling.py", "tuning", "refinement"),
)

_SKIPPED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Compare, ast.arguments, ast.Import, ast.ImportFrom)
_SIZES = (
    *("range", "slice", "reshape", "view", "expand", "zeros", "new_zeros", "ones", "empty", "new_empty", "arange"),
    *("split", "chunk", "unfold", "permute", "repeat", "pad", "warn", "isinstance", "flatten", "unflatten"),
)
_TOLERANCES = re.compile(r"finfo|rounding|reach|rtol|atol|tolerance|progress|floats|bytes")
_NOT_NUMBERS = {"int", "bool", "str", "slice", "tuple", "list", "Iterator", "None", "dict", "State"}


@dataclass(frozen=True)
class Site:
    """One mutant: what stands at some bytes of a file, and what is planted there."""

    file: str  # relative to the package
    function: str
    kind: str
    before: str
    after: str
    nth: int  # of those in the function that look the same
    line: int
    statement: tuple[int, int]  # its first and last line
    span: tuple[int, int]  # bytes

    @property
    def key(self) -> str:
        """Stays the same when other places of the file change."""
        text = "|".join([self.file, self.function, self.kind, self.before, self.after, str(self.nth)])
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def planted(self, source: str) -> str:
        raw, (start, stop) = source.encode(), self.span
        assert raw[start:stop].decode() == self.before, f"{self.file} is not what the sites were found in"
        return (raw[:start] + self.after.encode() + raw[stop:]).decode()


def core_sites(package: Path) -> list[Site]:
    """Of all files of the core, in order."""
    paths = [path for part in CORE for path in _files(package / part)]
    sources = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in paths}
    whole = whole_attributes(ast.parse(source) for source in sources.values())
    return [site for file, source in sources.items() for site in sites(file, source, whole)]


def sites(file: str, source: str, whole: frozenset[str]) -> list[Site]:
    """Of one file, given the attributes that are whole numbers."""
    raw, starts = source.encode(), _line_starts(source)
    found: list[Site] = []
    for name, function in _functions(ast.parse(source), ""):
        counts, seen = Counts.within(function, whole), Counter[tuple[str, str, str]]()
        for node, statement in _mathematics(function, (function.lineno, function.lineno)):
            span = starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset
            for kind, instead in changes(node, counts):
                text = ast.unparse(ast.fix_missing_locations(instead))
                look = kind, raw[slice(*span)].decode(), text if isinstance(instead, ast.stmt) else f"({text})"
                found.append(Site(file, name, *look, seen[look], node.lineno, statement, span))
                seen[look] += 1
    return found


def draw(found: list[Site], n: int, seed: int) -> list[Site]:
    """n sites: kinds take turns, and each takes a place in the file, then the function, with the fewest so far.

    Every site has a rank of its own, so that a change of one leaves the choice among the others nearly as it was.
    """
    ranked = sorted(found, key=lambda site: hashlib.sha256(f"{seed}|{site.key}".encode()).hexdigest())
    kinds = sorted({site.kind for site in found})
    drawn: list[Site] = []
    while len(drawn) < min(n, len(found)):
        for kind in kinds:
            files, functions = Counter(s.file for s in drawn), Counter((s.file, s.function) for s in drawn)
            left = [site for site in ranked if site.kind == kind and site not in drawn]
            if left and len(drawn) < n:
                drawn.append(min(left, key=lambda s: (files[s.file], functions[s.file, s.function])))
    return drawn


def _files(part: Path) -> list[Path]:
    return [part] if part.suffix == ".py" else sorted(part.glob("*.py"))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes, but for those that return no numbers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and _returns_numbers(child) and child.name != "__post_init__":
            yield prefix + child.name, child


def _returns_numbers(function: ast.FunctionDef) -> bool:
    words = set(re.findall(r"\w+", ast.unparse(function.returns))) if function.returns else set()
    return words in ({"None"}, set()) or not words <= _NOT_NUMBERS


def _mathematics(node: ast.AST, statement: tuple[int, int]) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Nodes that are neither sizes, indices, messages, conditions, tolerances nor annotations, and their statements."""
    for field, child in _children(node):
        if isinstance(child, _SKIPPED) or field in {"slice", "annotation", "returns", "decorator_list", "test"}:
            continue
        if isinstance(child, ast.stmt):
            body = getattr(child, "body", None)
            if body is None and _TOLERANCES.search(ast.unparse(child)):
                continue
            statement = child.lineno, child.end_lineno if body is None else child.lineno  # type: ignore[assignment]
        if hasattr(child, "lineno"):
            yield child, statement
        is_size = isinstance(child, ast.Call) and _called(child) in _SIZES
        yield from _mathematics(ast.Expr(child.func) if is_size else child, statement)  # type: ignore[attr-defined]


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield field, child


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _line_starts(source: str) -> list[int]:
    """Byte at which each line starts, counted from one."""
    starts = [0, 0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts
