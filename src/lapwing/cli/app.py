"""The commands: parse arguments, call the library, and show or save the records."""

from __future__ import annotations

import json
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from lapwing import __version__
from lapwing.cli.show import show_bench, show_bench_row, show_demo, show_job, show_jobs
from lapwing.errors import InputError, LapwingError, MissingExtraError


class PlainErrors(TyperGroup):
    """Prints errors of Lapwing as a message without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LapwingError as error:
            Console(stderr=True).print(f"[bold red]{type(error).__name__}:[/]", escape(str(error)), soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    name="lapwing",
    cls=PlainErrors,
    no_args_is_help=True,
    add_completion=False,
    # Errors that are not Lapwing's keep their ordinary traceback.
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
    size: Annotated[SizeName, typer.Option(help="Amount of work; toy is only for tests.")] = SizeName.demo,
    picture: Annotated[Path | None, typer.Option(help="Also write one PNG that shows the demo in a glance.")] = None,
    as_json: Json = False,
) -> None:
    """Train three small networks, give them error bars, and write a report you can open in a browser."""
    _need("demo", matplotlib="matplotlib", jinja2="jinja2", sklearn="scikit-learn", PIL="pillow")
    # Imported here: matplotlib and scikit-learn take seconds, for which --help should not wait.
    from lapwing_studies.bench.sizes import DEMO, TOY
    from lapwing_studies.demo import run as task
    from lapwing_studies.report.page import write_page
    from lapwing_studies.report.picture import write_picture

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
    workload: Annotated[
        str | None,
        typer.Option(help="One workload: W1 to W6 (all of them when left out), W5-mha, CT, CT-128; or jobs."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for bench.json or jobs.json; rows measured again replace the old ones.")
    ] = Path("bench-results"),
    chart: Annotated[
        Path | None, typer.Option(help="Only draw the saved results as SVG or PNG, and print them as Markdown.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="For jobs: folder of datasets.")] = None,
    only: Annotated[str | None, typer.Option(help="For jobs: one job, such as fashion-resnet.")] = None,
    limit: Annotated[float, typer.Option(help="For jobs: limit of CPU seconds for each.")] = 900.0,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="For jobs: only print the saved results as Markdown.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure fits, predictions and tuning in units of the network's own passes, each case in its own process."""
    if workload is not None and workload.lower() == "jobs":
        _bench_jobs(out / "jobs.json", data, only, limit, markdown=markdown, as_json=as_json)
        return
    if data is not None or only is not None or markdown:
        raise InputError("--data, --only and --markdown belong to whole jobs: add --workload jobs.")
    if chart is not None:
        _draw_bench(out, chart)
        return
    from lapwing_studies.bench import imaging, runner

    of_images = workload is not None and workload.lower() in ("ct", "ct-128")
    path = out / ("imaging.json" if of_images else "bench.json")
    merged = imaging.merged if of_images else runner.merged
    rows = []
    for row in imaging.run(str(workload)) if of_images else runner.run(workload):
        rows.append(row)
        # Save after every row, so that an interruption loses nothing.
        _save({"rows": merged(_saved_rows(path), [row])}, path)
        if not as_json:
            show_bench_row(row)
    if as_json:
        typer.echo(json.dumps({"rows": rows}))
    else:
        show_bench(rows, path)


def _bench_jobs(
    path: Path, data: Path | None, only: str | None, limit: float, *, markdown: bool, as_json: bool
) -> None:
    from lapwing_studies.bench.jobs import runner
    from lapwing_studies.report import jobs

    if markdown:
        saved = _saved_rows(path)
        if not saved:
            raise InputError(f"{path} holds no measurements. Run `lapwing bench --workload jobs` first.")
        typer.echo(jobs.markdown(saved))
        return
    records = []
    for record in runner.run(only, data=data, limit=limit):
        records.append(record)
        _save({"rows": runner.merged(_saved_rows(path), [record])}, path)
        if not as_json:
            show_job(record)
    if as_json:
        typer.echo(json.dumps({"rows": records}))
    else:
        show_jobs(records, path)


def _draw_bench(out: Path, chart: Path) -> None:
    _need("studies", matplotlib="matplotlib")
    from lapwing_studies.report.benchmarks import markdown, write_chart

    rows, peers = _saved_rows(out / "bench.json"), _saved_rows(out / "peers.json")
    if not rows:
        raise InputError(f"{out / 'bench.json'} holds no measurements. Run `lapwing bench --out {out}` first.")
    write_chart(rows, peers, chart)
    typer.echo(markdown(rows, peers))


def _saved_rows(path: Path) -> list[Any]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


@app.command()
def plan(
    target: Annotated[
        str | None, typer.Argument(help="package.module:function that returns (model, data, likelihood).")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="One of the benchmark's networks instead, such as W3.")] = None,
    memory: Annotated[str | None, typer.Option(help='A budget such as "4GB".')] = None,
    as_json: Json = False,
) -> None:
    """Estimate memory and passes of each structure, and what `auto` would take and why."""
    from lapwing.cli.plan import planned

    found = planned(target, workload, memory)
    typer.echo(json.dumps(found.record()) if as_json else str(found))


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument(help="Which study, or all; --list names them.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets; without it scikit-learn's own serve.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for records, trained weights and the page.")] = Path(
        "reproduce-results"
    ),
    tier: Annotated[
        str | None, typer.Option(help="quick (to see that it runs), standard (the default) or faithful (the paper's).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --tier quick.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds or splits (default: depends on the study).")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Fit and score again; kept networks are not retrained.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Only say what each study shows, needs and takes.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and print its table beside the published one; existing results are reused."""
    from lapwing.cli import reproduce as command

    if names:
        rows: Any = command.listed()
        typer.echo(json.dumps(rows)) if as_json else command.show_list(rows)
        return
    if table is None:
        raise InputError("Name a study, or all: lapwing reproduce STUDY. `lapwing reproduce --list` has their names.")
    _need("demo", matplotlib="matplotlib", jinja2="jinja2", sklearn="scikit-learn", PIL="pillow")
    options = command.Options(table, data, out, quick, seeds, again, tier)
    if table == command.ALL:
        rows = command.run_all(options)
        typer.echo(json.dumps(rows)) if as_json else command.show_all(rows)
        return
    record, page, path = command.run_study(options)
    if as_json:
        typer.echo(json.dumps(record))
    else:
        command.show_study(page, path)


def _need(extra: str, **packages: str) -> None:
    """Raise before any work if a package is missing, rather than after a minute of training."""
    for module, package in packages.items():
        if find_spec(module) is None:
            raise MissingExtraError(package, extra)


def _save(record: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    return path
