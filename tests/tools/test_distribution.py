"""The wheel and the source distribution that `make dist` has built: contents, metadata, a fresh environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import lapwing as lw

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
CORE = {"torch", "numpy", "jaxtyping", "tqdm"}


def _built(pattern: str) -> Path:
    found = sorted((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"{len(found)} files dist/{pattern}: run make dist"
    return found[0]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return _built("*.whl")


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as kept:
        return set(kept.namelist())


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as kept:
        (name,) = [name for name in kept.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(kept.read(name).decode())


def test_the_wheel_has_every_file_of_both_packages_and_nothing_else(wheel: Path) -> None:
    packages = ("lapwing", "lapwing_studies")
    expected = {
        str(path.relative_to(ROOT / "src"))
        for package in packages
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in _names(wheel) if ".dist-info/" not in name}
    assert found == expected
    assert "lapwing/py.typed" in found


def test_the_source_distribution_has_what_its_makefile_needs() -> None:
    with tarfile.open(_built("*.tar.gz")) as kept:
        names = {name.partition("/")[2] for name in kept.getnames()}
    at_the_top = {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "constraints.txt", "mkdocs.yml"}
    below = {"docs/index.md", "tests/conftest.py", "tools/package_map.py", "examples/quickstart_regression.py"}
    assert at_the_top | below <= names
    assert not [name for name in names if re.search(r"(^|/)(\.venv|node_modules|__pycache__|site|dist)(/|$)", name)]


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    assert _metadata(wheel)["Version"] == lw.__version__
    assert f"version: {lw.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == lw.__version__


def test_without_extras_only_four_packages_are_required(wheel: Path) -> None:
    required = [line for line in _metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ]", line)[0] for line in required} == CORE


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel in it, and what it requires."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(pip, check=True, timeout=900)
    return python


def _run(python: Path, *arguments: str, code: int = 0) -> str:
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}  # neither our PYTHONPATH nor another's packages
    command = [str(python), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=python.parent, env=environment, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_eight_lines_of_the_readme_run_with_the_core_packages_alone(fresh: Path) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "import torch" in block]
    said = _run(
        fresh, "-W", "error::DeprecationWarning", "-c", lines + "\nprint(lw.__file__, bool((low < high).all()))"
    )
    assert "site-packages" in said and "True" in said
    assert "No broken requirements" in _run(fresh, "-m", "pip", "check")


def test_what_needs_an_extra_says_which(fresh: Path) -> None:
    for module, extra in (
        ("sklearn", "sklearn"),
        ("lightning", "lightning"),
        ("transformers", "hf"),
        ("botorch", "botorch"),
    ):
        assert f"lapwing[{extra}]" in _run(fresh, "-c", f"import lapwing.{module}", code=1)
    assert "lapwing[studies]" in _run(fresh, str(fresh.parent / "lapwing"), "demo", code=1)
