"""`lapwing reproduce`: run a study by name, and write its record, page and tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from lapwing.errors import InputError, LapwingError

if TYPE_CHECKING:
    from lapwing_studies.report.study import StudyPage
    from lapwing_studies.report.tables import Table
    from lapwing_studies.reproduce.registry import Entry
    from lapwing_studies.reproduce.study import Study

ALL = "all"


@dataclass(frozen=True)
class Options:
    """The options of the command. `--quick` is another way to write `--tier quick`."""

    table: str
    data: Path | None
    out: Path
    quick: bool
    seeds: int | None
    again: bool
    tier: str | None = None

    @property
    def level(self) -> str:
        if self.quick and self.tier not in (None, "quick"):
            raise InputError(f"--quick is --tier quick, and --tier {self.tier} was given as well: give one of the two.")
        return "quick" if self.quick else self.tier or "standard"

    @property
    def entry(self) -> Entry:
        from lapwing_studies.reproduce.registry import entry

        return entry(self.table)

    @property
    def n_seeds(self) -> int:
        return self.entry.cost(self.level).seeds if self.seeds is None else self.seeds

    @property
    def command(self) -> str:
        words = ["lapwing reproduce", self.table]
        words += ["--data DIR"] if self.data is not None else []
        words += [f"--tier {self.level}"] if self.level != "standard" else []
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        return " ".join(words)


def run_study(options: Options) -> tuple[Any, StudyPage, Path]:
    """Run what has not been run; write record.json, claims.json, report.html, picture.png and tables.md."""
    from lapwing_studies.report.study import markdown, study_page, write_cover, write_study
    from lapwing_studies.reproduce.claims import kept

    entry = options.entry
    record = entry.study.run(study(options))
    page, folder = study_page(entry, record, options.command), options.out / options.table
    path = write_study(page, folder / "report.html")
    write_cover(page, folder / "picture.png")
    _write_json(record, folder / "record.json")
    rows = kept(entry.name, entry.paper, options.level, options.n_seeds, options.command, entry.claims(record))
    _write_json(rows, folder / "claims.json", indent=1)
    tables = "\n\n".join(f"{table.title}\n\n{markdown(table)}" for table in page.tables)
    (folder / "tables.md").write_text(tables + "\n", encoding="utf-8")
    return record, page, path


def _write_json(value: Any, path: Path, *, indent: int | None = None) -> None:
    text = json.dumps(value, allow_nan=False, indent=indent, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def study(options: Options) -> Study:
    from lapwing_studies.reproduce.effort import of_tier
    from lapwing_studies.reproduce.folder import DataFolder
    from lapwing_studies.reproduce.store import Store
    from lapwing_studies.reproduce.study import Study

    if options.data is not None and not options.data.is_dir():
        raise InputError(f"--data {options.data} is not a folder.")
    options.entry.cost(options.level)  # refuses a tier that the study does not have
    if options.n_seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {options.n_seeds}.")
    folder, store = DataFolder(options.data), Store(options.out / options.table)
    return Study(folder, store, of_tier(options.level), options.n_seeds, again=options.again)


def run_all(options: Options) -> list[dict[str, str]]:
    """Every study in turn; one that cannot run here (data or packages that are missing) is reported and passed over."""
    from lapwing_studies.reproduce.registry import STUDIES

    rows = []
    for entry in STUDIES:
        if options.level not in entry.tiers:
            continue
        started, page, problem = perf_counter(), "", ""
        try:
            page = str(run_study(replace(options, table=entry.name))[2].resolve())
        except LapwingError as error:
            problem = str(error)
        taken = f"{perf_counter() - started:.0f}"
        rows.append({"study": entry.name, "seconds": taken, "page": page, "problem": problem})
    return rows


def show_all(rows: list[dict[str, str]]) -> None:
    for row in rows:
        typer.echo(f"{row['study']:<20}{row['seconds']:>6} s  {row['page'] or 'not run: ' + row['problem']}")


def listed() -> list[dict[str, Any]]:
    """What every study shows, after which source, what it needs, and how long each tier takes."""
    from lapwing_studies.reproduce.registry import STUDIES

    return [
        {
            "study": e.name,
            "shows": e.shows,
            "after": e.paper,
            "needs": e.needs,
            "tiers": {tier: {"seeds": cost.seeds, "takes": cost.takes} for tier, cost in e.tiers.items()},
        }
        for e in STUDIES
    ]


def show_list(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["study"]) for row in rows) + 2
    for row in rows:
        takes = "; ".join(f"{tier}: {cost['takes']}" for tier, cost in row["tiers"].items())
        typer.echo(f"{row['study']:<{width}}{row['shows']} (after: {row['after']})")
        typer.echo(f"{'':<{width}}needs {row['needs']}; {takes}")
    typer.echo("Times are those of one core at rest, with the data of --data.")


def show_study(page: StudyPage, path: Path) -> None:
    """Print the tables, and where the page is."""
    console = Console()
    for table in page.tables:
        console.print(_rich(table))
        console.print(f"[dim]{table.see} {table.note}[/]\n", highlight=False)
    typer.echo(f"Open the page in a browser:\n  {path.resolve()}")


def _rich(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for k, heading in enumerate(table.columns):
        words = any(isinstance(row[k].sort, str) for row in table.rows)
        shown.add_column(heading, justify="left" if words else "right")
    for row in table.rows:
        shown.add_row(*(f"[bold]{cell.text}[/]" if cell.mark else cell.text for cell in row))
    return shown
