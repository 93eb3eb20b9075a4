"""A mutant in this process: the code of one function is swapped, whoever holds that function; no file is written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from .sites import Site


def plant(site: Site, package: Path) -> None:
    """For the rest of this process; decorators, and the checks of shapes they make, stay as they are."""
    path = package / site.file
    mutant = compile(site.planted(path.read_text(encoding="utf-8")), str(path), "exec")
    (code,) = (code for code in _codes(mutant) if _is_at(code, site))
    held = [f for f in gc.get_objects() if type(f) is FunctionType and _is_original(f.__code__, site, path)]
    assert held, f"{site.function} of {path} is not imported"
    for function in held:
        function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _is_original(code: CodeType, site: Site, path: Path) -> bool:
    return code.co_qualname == site.function and Path(code.co_filename) == path and _is_at(code, site)


def _is_at(code: CodeType, site: Site) -> bool:
    """Several functions may have one name, as those of a dispatch do; their lines tell them apart."""
    lines = [line for _, _, line in code.co_lines() if line]
    return code.co_qualname == site.function and min(lines) <= site.line <= max(lines)
