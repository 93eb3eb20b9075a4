"""The command line: arguments → the front door, records → terminal and files."""

from __future__ import annotations

import json
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from lapwing import __version__
from lapwing.cli.show import show_bench, show_demo
from lapwing.errors import InputError, LapwingError, MissingExtraError


class InWords(TyperGroup):
    """An error Lapwing raised on purpose is printed in words, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LapwingError as error:
            Console(stderr=True).print(f"[bold red]{type(error).__name__}:[/]", escape(str(error)), soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="lapwing",
    cls=InWords,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON, for machines.")]


class SizeName(str, Enum):
    demo = "demo"
    toy = "toy"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lapwing {__version__}")
        raise typer.Exit


@app.callback()
def lapwing(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Error bars for a trained network."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html and record.json.")] = Path("lapwing-report"),
    seed: Annotated[int, typer.Option(help="Seed of data, networks and draws.")] = 0,
    size: Annotated[SizeName, typer.Option(help="How much work; toy proves nothing.")] = SizeName.demo,
    picture: Annotated[Path | None, typer.Option(help="Also write one PNG that shows the demo in a glance.")] = None,
    as_json: Json = False,
) -> None:
    """Train three small networks, give them error bars, and write a report you can open in a browser."""
    _need("demo", matplotlib="matplotlib", jinja2="jinja2", sklearn="scikit-learn", PIL="pillow")
    from lapwing.bench import demo as task
    from lapwing.bench.sizes import DEMO, TOY
    from lapwing.report.page import write_page
    from lapwing.report.picture import write_picture

    record = task.run(seed=seed, size={SizeName.demo: DEMO, SizeName.toy: TOY}[size])
    page = write_page(record, out / "report.html")
    _save(record, out / "record.json")
    if picture is not None:
        write_picture(record, picture)
    if as_json:
        typer.echo(json.dumps(record))
    else:
        show_demo(record, page)


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for the record.")] = Path("bench-results"),
    as_json: Json = False,
) -> None:
    """Measure fit, prediction and tuning against a gradient epoch and a forward pass (workload W1)."""
    if find_spec("lapwing.bench.w1") is None:
        raise InputError("This installation has no workload W1 to measure. Install Lapwing from its full source.")
    record = import_module("lapwing.bench.w1").run()
    path = _save(record, out / f"{record['workload'].lower()}.json")
    if as_json:
        typer.echo(json.dumps(record))
    else:
        show_bench(record, path)


def _need(extra: str, **packages: str) -> None:
    """Refuse before any work starts: training for a minute and then missing a package is no way to treat people."""
    for module, package in packages.items():
        if find_spec(module) is None:
            raise MissingExtraError(package, extra)


def _save(record: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    return path
