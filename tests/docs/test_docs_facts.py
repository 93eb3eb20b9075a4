"""Numbers, words and defaults that the documentation states are those of the code.

Constants are looked up by name in the source, wherever they stand, so that moving one does not break a test.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from math import isqrt
from pathlib import Path

import pytest

import lapwing as lw
from lapwing.api import words

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def constants() -> dict[tuple[str, str], float]:
    """{(name without underscores in front, path of its module): value} of every module-level number."""
    found = {}
    for path in (ROOT / "src" / "lapwing").rglob("*.py"):
        for line in ast.parse(path.read_text("utf-8")).body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                source = ast.unparse(line.value)
                if re.fullmatch(r"[\d._e+*<>() -]+", source):
                    found[line.targets[0].id.lstrip("_"), str(path)] = eval(source)
    return found


def grouped(number: float) -> str:
    return f"{number:,}"


def constant(name: str, where: str = "") -> float:
    """The number of this name, in the one module whose path contains `where`."""
    values = [value for (key, path), value in constants().items() if key == name and where in path]
    message = (
        f"{len(values)} constants {name} in modules with '{where}' in their path: was it renamed? Then say so here."
    )
    assert len(values) == 1, message
    return int(values[0]) if values[0] == int(values[0]) else values[0]


# (page, sentence, the constants in it: a name, or a name and part of the path of its module, and what is done to it)
FACTS: list[tuple[str, str, tuple[str, ...], Callable[[float], str]]] = [
    ("structures.md", "never more than {} MiB", ("MOST_ROWS", "budget"), lambda n: f"{int(n) >> 20}"),
    (
        "structures.md",
        "The default is {} GiB, or half of the free memory",
        ("MOST_BYTES",),
        lambda n: f"{int(n) >> 30}",
    ),
    ("structures.md", "up to {} parameters. What does not fit", ("MOST_BYTES",), lambda n: f"{isqrt(int(n) // 24):,}"),
    ("structures.md", "for up to {} parameters", ("MOST_FULL",), grouped),
    ("structures.md", "the fit more than about {} gradient epochs", ("MOST_FIT_EPOCHS",), grouped),
    ("structures.md", "both together more than about {}", ("MOST_EPOCHS", "choice"), grouped),
    ("structures.md", "the exact block (up to {} entries)", ("MAX_DENSE_BLOCK",), grouped),
    ("engine.md", "dense block up to {} entries", ("MAX_DENSE_BLOCK",), grouped),
    ("quickstart.md", "up to {} parameters", ("MOST_FULL",), grouped),
    ("which-structure.md", "Up to about {} parameters", ("MOST_FULL",), grouped),
    ("which-structure.md", "Predictions of more than {} outputs", ("MANY_OUTPUTS",), grouped),
    ("predictions.md", "Above {} outputs", ("MANY_OUTPUTS",), grouped),
    ("predictions.md", "average {} draws of the linearised function", ("FUNCTION_PAIRS",), lambda n: f"{2 * n}"),
    ("posterior.md", "refuses above {} parameters", ("MAX_COVARIANCE",), grouped),
    ("evidence.md", "for up to {} parameters", ("MAX_PARAMETERS", "hessian"), grouped),
    (
        "evidence.md",
        "({} MiB, within the `memory` of `fit`)",
        ("MOST_STORED", "planning"),
        lambda n: f"{8 * int(n) >> 20}",
    ),
    ("evidence.md", "number at most {},", ("MOST_SIDE",), grouped),
    ("evidence.md", "less than {} nats", ("GAIN_TOLERANCE",), grouped),
    ("evidence.md", "by more than {} nats", ("TRUST_MARGIN",), grouped),
    ("evidence.md", "the first {} training data", ("MOST_CHECKED",), grouped),
    ("evidence.md", "more than {} variables", ("MOST_DIFFERENCES",), grouped),
    ("evidence.md", "The default budget of {} passes", ("DEFAULT_PASSES",), lambda n: {6: "six"}[int(n)]),
    ("evidence.md", "it is up to {} passes", ("MOST_DEFAULT_PASSES", "design"), grouped),
    ("reproduce-fisher.md", "more than {} gradient epochs", ("MOST_EPOCHS", "kind"), grouped),
    ("refinement.md", "weights or outputs number at most {}", ("MOST_SOLVED", "laplace"), grouped),
    ("refinement.md", "refuses above {}", ("MOST_SOLVED", "covariances"), grouped),
    ("sampling-em.md", "at most {}:", ("MOST_DENSE", "em"), grouped),
    ("matrix-free.md", "at most {} and at most a quarter of P", ("MOST", "nystrom"), grouped),
    ("saving.md", "Above {} parameters", ("MOST_MULTIPLIED_OUT",), grouped),
    ("data-and-models.md", "in batches of {}", ("ROWS", "data"), grouped),
]


@pytest.mark.parametrize(("page", "sentence", "name", "shown"), FACTS)
def test_numbers_are_those_of_the_code(page: str, sentence: str, name: tuple[str, ...], shown: Callable[[float], str]):
    wanted = sentence.replace("{}", shown(constant(*name)))
    assert wanted in " ".join((DOCS / page).read_text("utf-8").split())


def test_defaults_in_the_table_of_tuning():
    text = (DOCS / "evidence.md").read_text("utf-8")
    parameters = inspect.signature(lw.tune).parameters
    assert f'| `mode="{parameters["mode"].default}"` | the evidence at θ_* (default) |' in text
    assert f"| `curvature_at={parameters['curvature_at'].default}` |" in text
    assert f"| `groups={parameters['groups'].default}` |" in text


def test_every_word_has_a_row():
    structures = (DOCS / "structures.md").read_text("utf-8")
    assert [word for word in words.STRUCTURES if f'| `"{word}"`' not in structures] == []
    assert [word for word in words.WORDS["fisher"] if f'| `"{word}"`' not in structures] == []
    likelihoods = (DOCS / "likelihoods.md").read_text("utf-8")
    assert [word for word in words.WORDS["likelihood"] if f'`"{word}"`' not in likelihoods] == []
    groups = (DOCS / "priors.md").read_text("utf-8")
    assert [word for word in [*words.GROUPS, "normalised"] if f'| `"{word}"` |' not in groups] == []


def test_every_error_has_a_row():
    page = (DOCS / "errors.md").read_text("utf-8")
    errors = [name for name in lw.__all__ if name.endswith("Error") and name != "LapwingError"]
    assert errors and [name for name in errors if f"| `lw.{name}` |" not in page] == []


def test_studies_that_the_pages_name_exist():
    from lapwing_studies.reproduce.registry import names

    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    named = {
        name for page in pages for name in re.findall(r"lapwing reproduce\s+([a-z][\w-]+)", page.read_text("utf-8"))
    }
    assert named and named - {*names(), "all", "and"} == set()


def test_the_table_beside_other_libraries_is_what_was_tried() -> None:
    record = json.loads((ROOT / "bench_peers" / "tried.json").read_text("utf-8"))
    section = (ROOT / "README.md").read_text("utf-8").split("## Beside other libraries")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0][1:] == ["Lapwing", *(f"{name} {of['version']}" for name, of in record.items() if name != "lapwing")]
    assert {row[0]: row[1:] for row in rows[2:]} == {
        wish: [of["tried"][wish] for of in record.values()] for wish in record["lapwing"]["tried"]
    }
