"""The documentation as a site: every page is reachable, every link leads somewhere, every public name is described."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import lapwing as lw

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SECTIONS = ["Start", "Tutorials", "Guides", "Notebooks", "Concepts", "Reference", "Reproduced results", "Development"]
PUBLIC = sorted(name for name in dir(lw) if not name.startswith("_"))

hook = runpy.run_path(str(ROOT / "tools" / "glossary_links.py"))
TERMS = hook["terms"]((DOCS / "glossary.md").read_text("utf-8"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(markdown: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", markdown, flags=re.MULTILINE | re.DOTALL)


def headings(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that Python-Markdown gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(path: Path) -> set[str]:
    seen: Counter[str] = Counter()
    found = set()
    for name in map(slug, headings(path)):
        found.add(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(path: Path) -> Iterator[str]:
    """Targets of links and images inside the repository."""
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", without_code(path.read_text("utf-8"))):
        if not re.match(r"[a-z]+:", target):
            yield target


def navigation() -> list[str]:
    return re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    assert sorted(navigation()) == [str(page.relative_to(DOCS)) for page in PAGES]


def test_the_navigation_has_its_sections_in_order():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    assert re.findall(r"^  - ([^:]+):$", nav, re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_links_and_anchors_resolve(path: Path):
    broken = []
    for target in links(path):
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(target)
    assert not broken, f"{named(path)} links to {', '.join(broken)}, which do not exist"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_a_page_has_one_title_and_a_text_for_every_image(path: Path):
    text = path.read_text("utf-8")
    titles = re.findall(r"^# .+$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    assert len(titles) == 1 and text.startswith("# ")
    assert not re.findall(r"!\[\s*\]", text), "an image without a text that says what it shows"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_headings_leave_out_no_level(path: Path):
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]
    assert all(after <= before + 1 for before, after in pairwise(levels))


WISHES = {
    "intervals for a regression": (".interval(0.95)", "quickstart.md", ".interval("),
    "an alarm for images out of distribution": ("lw.alarm(posterior, held_out)", "guarantees.md", "lw.alarm("),
    "LoRA on a Trainer": (
        "lapwing.transformers.fit(trainer)",
        "tutorials/lora.md",
        "lapwing.transformers.fit(trainer)",
    ),
    "a prior per layer": ('lw.tune(posterior, groups="layer")', "priors.md", 'groups="layer"'),
    "a Gaussian process": ('structure="gp"', "function-space.md", 'structure="gp"'),
    "training by the marginal likelihood": ("lw.train.marglik(", "tutorials/training.md", "lw.train.marglik("),
    "a reconstruction with error bars": (
        "lw.imaging.reconstruct(A, y)",
        "tutorials/images.md",
        "lw.imaging.posterior(",
    ),
    "serving without Lapwing": ('lw.export(posterior, "net.onnx"', "export.md", "onnxruntime.InferenceSession("),
}


@pytest.mark.parametrize("wish", WISHES)
def test_both_front_pages_lead_to_the_call(wish: str):
    """The call stands there, and the page has an example of it that runs."""
    call, page, used = WISHES[wish]
    assert call in (DOCS / "index.md").read_text("utf-8") and call in (ROOT / "README.md").read_text("utf-8")
    assert f"(docs/{page}" in (ROOT / "README.md").read_text("utf-8")
    assert used in "".join(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.M | re.DOTALL))


def test_a_missing_anchor_would_be_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n## Two `words`, twice\n\n## Two words, twice\n\n[x](page.md#nowhere)\n")
    assert anchors(page) == {"a-title", "two-words-twice", "two-words-twice_1"}
    assert [target.partition("#")[2] in anchors(page) for target in links(page)] == [False]


# --- the glossary ---------------------------------------------------------------------------------


def test_glossary_terms_are_alphabetical_and_unique():
    names = [term.names[0].lower() for term in TERMS]
    assert names == sorted(names)
    every = [name.lower() for term in TERMS for name in term.names]
    assert len(set(every)) == len(every) and len(TERMS) >= 40


def test_glossary_anchors_are_those_of_the_site():
    assert {term.anchor for term in TERMS} <= anchors(DOCS / "glossary.md")


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "glossary.md"], ids=named)
def test_the_first_use_of_every_term_is_linked_and_nothing_else_changes(path: Path):
    text = path.read_text("utf-8")
    linked = hook["link_first_uses"](text, TERMS, "glossary.md")
    added = re.compile(r'\[([^\]]+)\]\(glossary\.md#[\w-]+ "[^"]*"\)')
    assert added.sub(r"\1", linked) == text
    assert max(Counter(re.findall(r"glossary\.md#([\w-]+) \"", linked)).values(), default=1) == 1
    assert hook["link_first_uses"](linked, TERMS, "glossary.md") == linked  # no first use is left


def test_a_longer_name_is_no_use_of_the_shorter_one():
    linked = hook["link_first_uses"](
        "The marginal likelihood of a prior precision. A likelihood.", TERMS, "glossary.md"
    )
    found = re.findall(r"\[([^\]]+)\]\(glossary\.md#([\w-]+) ", linked)
    assert found == [
        ("marginal likelihood", "evidence"),
        ("prior precision", "prior-precision"),
        ("likelihood", "likelihood"),
    ]


def test_code_headings_and_links_are_left_alone():
    page = "# The evidence\n\nOf `evidence`, [evidence](x.md) and log\nevidence. The evidence.\n\n    evidence\n"
    linked = hook["link_first_uses"](page, [term for term in TERMS if term.anchor == "evidence"], "glossary.md")
    assert linked.startswith(
        "# The evidence\n\nOf `evidence`, [evidence](x.md) and [log\nevidence](glossary.md#evidence "
    )
    assert linked.endswith("The evidence.\n\n    evidence\n")


def test_an_acronym_is_not_a_word():
    terms = [term for term in TERMS if term.anchor == "map"]
    assert hook["link_first_uses"]("A feature map.", terms, "glossary.md") == "A feature map."
    assert "[MAP](" in hook["link_first_uses"]("The MAP estimate.", terms, "glossary.md")


# --- the code -------------------------------------------------------------------------------------


def test_every_public_name_is_on_the_reference_page():
    described = re.findall(r"^::: lapwing\.(\w+)$", (DOCS / "reference.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(described) == PUBLIC


def test_every_public_name_is_in_an_example():
    code = "".join(re.findall(r"^```python\n(.*?)^```", (DOCS / "reference.md").read_text("utf-8"), re.M | re.DOTALL))
    assert [name for name in PUBLIC if not re.search(rf"\blw\.{name}\b", code)] == []


ADAPTERS = {
    "lapwing.sklearn": "sklearn.py",
    "lapwing.lightning": "lightning.py",
    "lapwing.transformers": "transformers.py",
    "lapwing.botorch": "botorch.py",
    "lapwing.compat.laplace_torch": "compat/laplace_torch.py",
}


def public(source: Path) -> list[str]:
    """The `__all__` of a module that may need packages that are not here."""
    lines = [line for line in ast.parse(source.read_text("utf-8")).body if isinstance(line, ast.Assign)]
    return next(ast.literal_eval(line.value) for line in lines if ast.unparse(line.targets[0]) == "__all__")


@pytest.mark.parametrize("module", ["train", "imaging", "acquisition"])
def test_every_name_of_a_public_module_is_described_and_in_an_example(module: str):
    page = (DOCS / "reference.md").read_text("utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.DOTALL))
    names = getattr(lw, module).__all__
    assert [name for name in names if not re.search(rf"\blw\.{module}\.{name}\b", code)] == []
    described = set(re.findall(rf"^::: lapwing\.{module}\.(\w+)$", page, re.M))
    listed = re.search(rf"^::: lapwing\.{module}$(\n    options:\n      members: (.*))?", page, re.M)
    whole = listed is not None and listed[2] != "false"  # the module's own entry describes its members
    assert [name for name in names if name not in described and not whole] == []


@pytest.mark.parametrize("module", ADAPTERS)
def test_every_name_of_an_adapter_is_described_and_in_an_example(module: str):
    names = public(ROOT / "src" / "lapwing" / ADAPTERS[module])
    described = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", (DOCS / "reference.md").read_text("utf-8"), re.M)
    assert sorted(described) == sorted(names)
    pages = ["".join(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)) for page in PAGES]
    using = "".join(code for code in pages if module in code)
    assert [name for name in names if not re.search(rf"\b{name}\b", using)] == []


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_files_that_the_prose_names_exist(path: Path):
    named_files = re.findall(r"`(?:python -m )?((?:src|tests|docs|examples|tools)/[\w/.-]+)", path.read_text("utf-8"))
    assert [file for file in named_files if not (ROOT / file).exists()] == []


def calls(path: Path) -> Iterator[tuple[str, Any, list[str]]]:
    """Calls of public names and of methods of a posterior, with their keywords, as the prose has them."""
    owners = {"lw": lw, "posterior": lw.Posterior}
    prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", prose):
        for name, arguments in re.findall(r"\b(lw(?:\.\w+)+|posterior\.\w+)\(((?:[^()]|\([^()]*\))*)\)", code):
            owner, *parts = name.split(".")
            found = reduce(lambda value, part: getattr(value, part, None), parts, owners[owner])
            outer = re.sub(r"\([^()]*\)|\"[^\"]*\"", "", arguments)
            yield name, found, re.findall(r"\b(\w+)=", outer)


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_calls_in_the_prose_exist_with_these_arguments(path: Path):
    wrong = []
    for name, found, keywords in calls(path):
        if found is None:
            wrong.append(name)
        else:
            parameters = inspect.signature(found).parameters
            wrong += [f"{name}({keyword}=...)" for keyword in keywords if keyword not in parameters]
    assert not wrong, f"{named(path)} speaks of {', '.join(wrong)}, which do not exist"
