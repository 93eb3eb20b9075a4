"""The playground's recorded cases are what Lapwing answers today, and its page is built from its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PLAYGROUND = ROOT / "playground"
PAGE = ROOT / "docs" / "playground" / "page.html"


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


def test_the_page_is_built_from_its_sources():
    """Needs no node: the build writes into the page what it was built from (playground/vite.config.ts)."""
    assert _digest_in_page() == _digest_of_sources(), "The page is stale: run make playground (needs node)."


def test_the_page_is_one_file_that_may_load_nothing():
    text = PAGE.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    loading = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["'](?!data:)""", text)
    assert not loading
    assert len(text) < 120_000


def test_the_documentation_embeds_the_page():
    """docs/playground.md is served as playground/index.html, beside the page."""
    text = (ROOT / "docs" / "playground.md").read_text(encoding="utf-8")
    targets = re.findall(r"""(?:src|href)="([^"]+\.html)\"""", text)
    assert targets == [PAGE.name, PAGE.name]
    assert re.search(r"<iframe[^>]*\btitle=\"[^\"]+\"", text)


def _digest_in_page() -> str:
    found = re.search(r'<meta name="sources" content="([0-9a-f]{64})"', PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def _digest_of_sources() -> str:
    names = ["index.html", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    names += [path.relative_to(PLAYGROUND).as_posix() for path in (PLAYGROUND / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\n".encode())
        digest.update((PLAYGROUND / name).read_text(encoding="utf-8").encode())  # newlines as \n, as the build does
    return digest.hexdigest()


def _relative(now: object, then: object) -> float:
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (now, then))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.shape == b.shape else float("inf")
