"""The notebooks run, and their pages in the documentation are those of their sources."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import notebooks

NEED_EXTRAS = {"bayesian_optimisation", "text_lora"}  # make test-notebooks installs them


def test_there_is_a_notebook_for_each_kind_of_task():
    assert set(notebooks.names()) == NEED_EXTRAS | {"tabular", "vision_ood", "active_learning", "segmentation"}


@pytest.mark.parametrize("name", notebooks.names())
def test_the_page_of_a_notebook_has_its_cells(name: str):
    page = (notebooks.PAGES / f"{name}.md").read_text("utf-8")
    assert notebooks.without_outputs(page) == notebooks.unexecuted(name), "run make notebooks"
    assert "```text\n" in page and f"../assets/notebooks/{name}-1.png" in page


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in NEED_EXTRAS else [pytest.mark.slow]) for n in notebooks.names()]
)
def test_a_notebook_runs_and_prints_and_draws(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    path, pictures = notebooks.SOURCES / f"{name}.py", []
    with torch.random.fork_rng(devices=[]):
        text = notebooks.page(
            name,
            notebooks.executed(path, notebooks.cells(path.read_text("utf-8"))),
            lambda _, png: pictures.append(png),
        )
    assert text.count("```text\n") >= 3
    assert pictures and all(len(png) > 10_000 for png in pictures)


def test_cells_prose_output_and_pictures(tmp_path: Path):
    source = '# %% [markdown]\n# # Title\n#\n# Prose.\n\n# %%\nprint("a")\n\n# %% alt="A line."\n'
    source += "import matplotlib.pyplot as plt\nplt.plot([0, 1])\n"
    kept = {}
    page = notebooks.page(
        "x", notebooks.executed(tmp_path / "x.py", notebooks.cells(source)), lambda name, png: kept.update({name: png})
    )
    assert page.startswith("# Title\n\nProse.\n\n*Made from")
    assert '```python\nprint("a")\n```\n\n```text\na\n```\n' in page
    assert page.endswith("![A line.](../assets/notebooks/x-1.png)\n") and kept["x-1.png"].startswith(b"\x89PNG")
    assert "```text" not in notebooks.without_outputs(page) and "A line" not in notebooks.without_outputs(page)


def test_a_picture_without_words_is_refused(tmp_path: Path):
    source = "# %% [markdown]\n# # T\n\n# %%\nimport matplotlib.pyplot as plt\nplt.plot([0, 1])\n"
    with pytest.raises(ValueError, match="line 5 draws"):
        notebooks.page("x", notebooks.executed(tmp_path / "x.py", notebooks.cells(source)), lambda *_: None)


def test_an_error_names_the_line_of_the_file(tmp_path: Path):
    path = tmp_path / "x.py"
    path.write_text("# %% [markdown]\n# # T\n\n# %%\nx = 1\nraise KeyError(x)\n", "utf-8")
    with pytest.raises(KeyError) as caught:
        list(notebooks.executed(path, notebooks.cells(path.read_text("utf-8"))))
    assert caught.traceback[-1].lineno + 1 == 6
