"""`lapwing plan`: build the model from an import path or a benchmark workload, and call lw.plan."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from lapwing import Plan, plan
from lapwing.errors import InputError

_EXPECTED = "a function that returns (model, data, likelihood)"


def planned(target: str | None, workload: str | None, memory: str | None) -> Plan:
    """The plan for the import path or the workload, whichever is given."""
    if (target is None) == (workload is None):
        raise InputError(f"Name either package.module:function, {_EXPECTED}, or a --workload.")
    model, data, likelihood = _built(target) if target is not None else _of_workload(str(workload))
    return plan(model, data, likelihood, memory=memory)


def _of_workload(name: str) -> tuple[Any, Any, Any]:
    from lapwing_studies.bench import workloads

    built = workloads.build(name)
    return built.model, built.batches, built.likelihood


def _built(target: str) -> tuple[Any, Any, Any]:
    """What `package.module:function` returns. The current folder comes first in the path, as with `python -m`."""
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise InputError(f"Expected package.module:function, {_EXPECTED}, got {target!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        build = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{target}: {error}. Expected {_EXPECTED}, importable from here.") from error
    result = build() if callable(build) else build
    if not isinstance(result, tuple) or len(result) != 3:
        raise InputError(f"{target}: expected {_EXPECTED}, got {type(result).__name__}.")
    return result
