"""What `pip install lapwing` brings, and names that were public before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import lapwing as lw
from lapwing import cli

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {"torch", "numpy", "jaxtyping", "tqdm"}


def test_the_core_depends_on_four_packages():
    names = {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}
    assert names == CORE


def test_importing_the_library_imports_nothing_of_the_extras():
    extras = ("typer", "rich", "matplotlib", "jinja2", "sklearn", "scipy", "pandas", "lapwing_studies")
    loaded = f"[m for m in {extras!r} if m in sys.modules]"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, lapwing; print({loaded})"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_command_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "find_spec", lambda package: None)
    with pytest.raises(SystemExit, match=r"lapwing\[studies\]"):
        cli.main()


@pytest.mark.parametrize(("old", "new"), [("Dense", "Cholesky"), ("sampled", "from_samples")])
def test_old_public_names_still_work(old: str, new: str):
    with pytest.warns(DeprecationWarning, match=f"lapwing.{new}"):
        assert getattr(lw, old) is getattr(lw, new)
    assert old not in dir(lw) and new in dir(lw)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = lw.nothing_of_the_kind


def test_names_that_differ_by_case_alone_are_a_call_and_what_it_returns():
    lower = [name.lower() for name in lw.__all__]
    assert {name for name in lower if lower.count(name) > 1} == {"alarm", "conformal", "plan"}


def test_the_benchmark_keeps_its_old_name():
    found = subprocess.run(
        [sys.executable, "-m", "lapwing.bench.case", "W9", "none"], capture_output=True, text=True, check=False
    )
    assert "lapwing_studies.bench.case" in found.stderr and "W9" in found.stderr
