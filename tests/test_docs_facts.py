"""Numbers, words and defaults that the documentation states are those of the code.

Constants are looked up by name in the source, wherever they stand, so that moving one does not break a test.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from math import isqrt
from pathlib import Path

import pytest

import lapwing as lw
from lapwing.api import words

ROOT = Path(__file__).parent.parent
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


def constant(name: str, where: str = "") -> int:
    """The number of this name, in the one module whose path contains `where`."""
    values = [value for (key, path), value in constants().items() if key == name and where in path]
    assert len(values) == 1, f"{len(values)} constants {name} in modules with '{where}' in their path"
    return int(values[0]) if values[0] == int(values[0]) else values[0]


def facts() -> list[tuple[str, str]]:
    many, full = constant("MANY_OUTPUTS"), constant("MOST_FULL")
    return [
        ("structures.md", f"never more than {constant('MOST_ROWS', 'budget') >> 20} MiB"),
        (
            "structures.md",
            f"The default is {constant('MOST_BYTES') >> 30} GiB, or half of the free memory if that is less",
        ),
        ("structures.md", f"up to {isqrt(constant('MOST_BYTES') // 24):,} parameters"),
        ("structures.md", f"for up to {full:,} parameters"),
        ("structures.md", f"the fit more than about {constant('MOST_FIT_EPOCHS')} gradient epochs"),
        ("structures.md", f"both together more than about {constant('MOST_EPOCHS', 'choice')}"),
        ("structures.md", f"the exact block (up to {constant('MAX_DENSE_BLOCK'):,} entries)"),
        ("engine.md", f"dense block up to {constant('MAX_DENSE_BLOCK'):,} entries"),
        ("quickstart.md", f"up to {full:,} parameters"),
        ("which-structure.md", f"Up to about {full:,} parameters"),
        ("which-structure.md", f"Predictions of more than {many} outputs"),
        ("predictions.md", f"Above {many} outputs"),
        ("predictions.md", f"average {2 * constant('FUNCTION_PAIRS')} draws of the linearised function"),
        ("posterior.md", f"refuses above {constant('MAX_COVARIANCE'):,} parameters"),
        ("evidence.md", f"for up to {constant('MAX_PARAMETERS', 'hessian'):,} parameters"),
        ("evidence.md", f"({8 * constant('MOST_STORED', 'planning') >> 20} MiB, within the `memory` of `fit`)"),
        ("evidence.md", f"number at most {constant('MOST_SIDE'):,}"),
        ("evidence.md", f"less than {constant('GAIN_TOLERANCE')} nats"),
        ("evidence.md", f"by more than {constant('TRUST_MARGIN')} nats"),
        ("evidence.md", f"the first {constant('MOST_CHECKED')} training data"),
        ("evidence.md", f"more than {constant('MOST_DIFFERENCES')} variables"),
        ("evidence.md", f"The default budget of {({6: 'six'})[constant('DEFAULT_PASSES')]} passes"),
        ("reproduce-fisher.md", f"more than {constant('MOST_EPOCHS', 'kind')} gradient epochs"),
        ("refinement.md", f"weights or outputs number at most {constant('MOST_SOLVED', 'laplace'):,}"),
        ("refinement.md", f"refuses above {constant('MOST_SOLVED', 'covariances'):,}"),
        ("sampling-em.md", f"at most {constant('MOST_DENSE', 'em'):,}"),
        ("matrix-free.md", f"at most {constant('MOST', 'nystrom')} and at most a quarter of P"),
        ("saving.md", f"Above {constant('MOST_MULTIPLIED_OUT'):,} parameters"),
        ("data-and-models.md", f"in batches of {constant('ROWS', 'data')}"),
    ]


@pytest.mark.parametrize(("page", "sentence"), facts())
def test_numbers_are_those_of_the_code(page: str, sentence: str):
    assert sentence in " ".join((DOCS / page).read_text("utf-8").split())


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
    from lapwing.cli.reproduce import TableName

    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    named = {
        name for page in pages for name in re.findall(r"lapwing reproduce\s+([a-z][\w-]+)", page.read_text("utf-8"))
    }
    assert named and named - {table.value for table in TableName} - {"and"} == set()
