"""What a fit would cost in memory, and what `auto` picks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from lapwing.curvature import Block, Diag, Full, Structure
from lapwing.errors import InputError, InputTypeError
from lapwing.params import ParamLayout

_DEFAULT_BYTES = 4 << 30
_AUTO_BLOCK = 5_000  # largest dense block `auto` takes unasked: about a second of factorisation
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Plan:
    """A structure and the numbers of rows it may hold at a time."""

    structure: Structure
    chunk_floats: int
    why: str


def parse_memory(memory: str | float | None) -> int:
    """Bytes of a budget such as "4GB", 2e9 or None (the default, 4 GiB)."""
    if memory is None:
        return _DEFAULT_BYTES
    if isinstance(memory, int | float):
        size = float(memory)
    elif isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", memory)
        if not match or match[2].upper() not in _UNITS:
            raise InputError(f'memory: expected bytes or text such as "4GB" or "512MiB", got {memory!r}.')
        size = float(match[1]) * _UNITS[match[2].upper()]
    else:
        raise InputTypeError(f'memory: expected bytes or text such as "4GB", got {type(memory).__name__}.')
    if not 0 < size < inf:
        raise InputError(f'memory: the budget must be positive and finite, such as "4GB", got {memory!r}.')
    return int(size)


def make_plan(structure: Structure | None, layout: ParamLayout, n_parts: int, memory: str | float | None) -> Plan:
    """Check the budget before any work starts; `structure=None` means choose."""
    budget = parse_memory(memory)
    if structure is None:
        structure, why = _choose(layout, n_parts, budget)
    else:
        why = "asked for"
    needed = needed_bytes(structure, layout, n_parts)
    if needed > budget:
        raise InputError(_too_big(structure, layout, n_parts, needed, budget))
    # A third of what is left, up to 256 MiB of rows: larger pieces gain no speed.
    return Plan(structure, min(256 << 20, max((budget - needed) // 3, 1 << 20)) // 8, why)


def needed_bytes(structure: Structure, layout: ParamLayout, n_parts: int) -> int:
    """The curvature's parts, their sum and its factor, in float64."""
    return 8 * structure.stored_floats(layout) * (n_parts + 2)


def _choose(layout: ParamLayout, n_parts: int, budget: int) -> tuple[Structure, str]:
    largest = max(s.stop - s.start for s in layout.module_slices.values())
    if layout.p <= _AUTO_BLOCK and needed_bytes(Full(), layout, n_parts) <= budget:
        return Full(), f"{layout.p} parameters: the full matrix is exact and affordable"
    if largest <= _AUTO_BLOCK and needed_bytes(Block(), layout, n_parts) <= budget:
        return Block(), f"{layout.p} parameters are too many for the full matrix; each layer's own block fits"
    return Diag(), f"{layout.p} parameters, {largest} in one layer: only the diagonal is affordable"


def _too_big(structure: Structure, layout: ParamLayout, n_parts: int, needed: int, budget: int) -> str:
    fits = [s for s in (Block(), Diag()) if needed_bytes(s, layout, n_parts) <= budget]
    advice = (
        f"{type(fits[0]).__name__.lower()} would take {_size(needed_bytes(fits[0], layout, n_parts))}"
        if fits
        else 'infer fewer parameters, e.g. params="last_layer"'
    )
    return (
        f"structure {type(structure).__name__.lower()} on {layout.p} parameters needs {_size(needed)}, more than the "
        f"budget of {_size(budget)}. Raise `memory`, or take less: {advice}."
    )


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"
