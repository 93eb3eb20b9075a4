"""The playground's recorded cases are what Lapwing answers today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PLAYGROUND = Path(__file__).parents[1] / "playground"


def _recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_cases", PLAYGROUND / "record_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


recorder = _recorder()
RECORDED = recorder.recorded()


@pytest.mark.parametrize(("inputs", "then"), RECORDED, ids=[inputs.name for inputs, _ in RECORDED])
def test_recorded_cases_are_todays_answers(inputs, then):
    now = recorder.answers(inputs)
    assert now.keys() == then.keys()
    stale = {key: error for key in now if (error := _relative(now[key], then[key])) > 1e-7}
    assert not stale, f"Lapwing answers otherwise now; run python playground/record_cases.py, then npm test: {stale}"


def test_a_case_for_every_structure_and_both_likelihoods():
    kinds = {(inputs.structure, inputs.classes) for inputs, _ in RECORDED}
    assert kinds == {(name, classes) for name in recorder.STRUCTURES for classes in (False, True)}


def _relative(now: object, then: object) -> float:
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (now, then))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.shape == b.shape else float("inf")
