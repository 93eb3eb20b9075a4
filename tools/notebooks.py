"""Execute the notebooks of notebooks/ and write them as pages of the documentation, with what they print and draw.

    python tools/notebooks.py [tabular segmentation ...]

A notebook is a Python script in the percent format, which Jupyter opens through jupytext: cells begin with `# %%`,
prose with `# %% [markdown]`. A cell that draws says in words what is to be seen: `# %% alt="..."`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
PICTURES = ROOT / "docs" / "assets" / "notebooks"
REPOSITORY_FOLDER = "notebooks"
_START = re.compile(r"^# %%(?P<prose> \[markdown\])?(?: alt=\"(?P<alt>[^\"]*)\")?[ ]*$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """One cell: prose as Markdown, or code, with the text for the picture that it draws."""

    is_prose: bool
    source: str
    alt: str | None
    line: int  # of the file, for tracebacks


@dataclass(frozen=True)
class Output:
    """What a code cell printed, and its pictures as PNG."""

    printed: str
    pictures: tuple[bytes, ...]


def names() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def cells(text: str) -> list[Cell]:
    """The cells of a script; what stands before the first one (jupytext's header) is left out."""
    starts = list(_START.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    found = []
    for start, end in zip(starts, ends):
        body = text[start.end() : end].strip("\n")
        is_prose = start["prose"] is not None
        source = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_prose else body
        found.append(Cell(is_prose, source, start["alt"], text.count("\n", 0, start.end()) + 2))
    return found


def executed(path: Path, of: Iterable[Cell]) -> Iterator[tuple[Cell, Output | None]]:
    """Cell by cell, in one namespace, with figures drawn to memory."""
    import matplotlib

    matplotlib.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    for cell in of:
        if cell.is_prose:
            yield cell, None
            continue
        printed = io.StringIO()
        code = compile("\n" * (cell.line - 1) + cell.source, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield cell, Output(printed.getvalue().strip("\n"), tuple(_figures()))


def _figures() -> Iterator[bytes]:
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        png = io.BytesIO()
        pyplot.figure(number).savefig(png, dpi=110, bbox_inches="tight", metadata={"Software": None})
        yield png.getvalue()
    pyplot.close("all")


def page(name: str, found: Iterable[tuple[Cell, Output | None]], keep: Callable[[str, bytes], None]) -> str:
    """The Markdown of an executed notebook; `keep` is given the name and the bytes of every picture."""
    parts, count = [], 0
    for cell, output in found:
        parts.append(cell.source if cell.is_prose else f"```python\n{cell.source}\n```")
        if output is not None and output.printed:
            parts.append(f"```text\n{output.printed}\n```")
        for picture in () if output is None else output.pictures:
            if not cell.alt:
                raise ValueError(f'{name}: the cell at line {cell.line} draws; begin it with `# %% alt="..."`.')
            count += 1
            keep(f"{name}-{count}.png", picture)
            parts.append(f"![{cell.alt}](../assets/notebooks/{name}-{count}.png)")
    made = (
        f"*Made from `{REPOSITORY_FOLDER}/{name}.py` by `make notebooks`; Jupyter opens the script through jupytext. "
        f"Its settings were chosen with its results in view: it shows how, and the [studies](../results.md) measure.*"
    )
    return "\n\n".join([parts[0], made, *parts[1:]]) + "\n"


def without_outputs(markdown: str) -> str:
    """A page without what running it added: what must agree with its source at any time."""
    markdown = re.sub(r"^```text\n.*?^```\n\n?", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^!\[[^\n]*\]\([^\n]*\)\n\n?", "", markdown, flags=re.MULTILINE).rstrip() + "\n"


def unexecuted(name: str) -> str:
    text = (SOURCES / f"{name}.py").read_text("utf-8")
    return without_outputs(page(name, ((cell, None) for cell in cells(text)), lambda *_: None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    for name in parser.parse_args().names or names():
        started, path = time.process_time(), SOURCES / f"{name}.py"
        for folder in (PAGES, PICTURES):
            folder.mkdir(parents=True, exist_ok=True)
        for old in PICTURES.glob(f"{name}-*.png"):
            old.unlink()
        text = page(name, executed(path, cells(path.read_text("utf-8"))), lambda n, png: _write(PICTURES / n, png))
        (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"{name:24s}{time.process_time() - started:6.0f} s of CPU time", flush=True)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


if __name__ == "__main__":
    main()
