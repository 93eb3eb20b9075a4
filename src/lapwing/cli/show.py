"""Print records to the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from lapwing_studies.bench.case import Row
    from lapwing_studies.bench.jobs.records import JobRecord
    from lapwing_studies.bench.records import DemoRecord
    from lapwing_studies.report.tables import Table as Values

METHOD_STYLES = {"MAP": "yellow", "sampled network": "magenta", "GLM": "cyan"}


def show_demo(record: DemoRecord, page: Path) -> None:
    """Print both tables, then the path of the report, last so that it is visible."""
    from lapwing_studies.report import tables

    console = Console()
    for values in (tables.regression(record["regression"]), tables.digits(record["digits"])):
        console.print(_table(values))
        console.print(f"[dim]{escape(values.see)} {escape(values.note)}[/]\n", highlight=False)
    console.print(f"Took {record['seconds']:.0f} s. Open the report in a browser:")
    console.print(f"  [bold]{page.resolve()}[/]", soft_wrap=True, highlight=False)


def show_bench_row(row: Row) -> None:
    """Print one line as soon as it is measured; all rows take minutes."""
    value = row["note"] if row["ratio"] is None else f"{row['ratio']:.3g} {row['unit']}"
    Console().print(f"[dim]{row['workload']:<7}{escape(row['what'])}: {escape(value)}[/]", highlight=False)


def show_bench(rows: list[Row], path: Path) -> None:
    """Print one line per measurement: the ratio, its unit, the goal, and whether it is met."""
    table = Table(title="In units of the network's own passes", title_justify="left")
    for heading, justify in (("", "left"), ("what", "left"), ("measured", "right"), ("goal", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for heading, justify in (("unit", "left"), ("peak MiB", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        measured = "–" if row["ratio"] is None else f"{row['ratio']:.3g}"
        goal = "–" if row["goal"] is None else f"≤ {row['goal']:g}"
        peak = "–" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        table.add_row(row["workload"], row["what"], measured, goal, row["unit"], peak, _verdict(row))
    console = Console()
    console.print(table)
    console.print(f"Saved to {path}", soft_wrap=True, highlight=False)


def show_job(record: JobRecord) -> None:
    """Print one line as soon as a job is done."""
    phases = ", ".join(f"{name} {phase['seconds']:.3g} s" for name, phase in record["phases"].items())
    told = "; ".join(part for part in (phases, record["note"]) if part)
    Console().print(f"[dim]{record['job']:<15}{escape(told)}[/]", highlight=False)


def show_jobs(records: list[JobRecord], path: Path) -> None:
    """Print what each job costs in passes of the network, then its quality beside other methods."""
    from lapwing_studies.report import jobs

    console = Console()
    titled = (
        ("Fit and tune in gradient epochs, prediction in forward passes per input", jobs.COST, jobs.cost_row),
        ("NLL of the test rows, and CPU seconds on top of the one training", jobs.QUALITY, jobs.quality_row),
    )
    for title, headings, cells in titled:
        table = Table(title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading)
        for record in records:
            table.add_row(*map(escape, cells(record)))
        console.print(table)
    console.print(f"Saved to {path}", soft_wrap=True, highlight=False)


def _verdict(row: Row) -> str:
    if row["ratio"] is None:
        return f"[red]{escape(row['note'])}[/]"
    pairs = [(row["ratio"], row["goal"]), (row["peak_mib"], row["goal_mib"])]
    judged = [value <= goal for value, goal in pairs if value is not None and goal is not None]
    return "" if not judged else "[green]met[/]" if all(judged) else "[red]missed[/]"


def _table(values: Values) -> Table:
    # No rules and one space between columns: otherwise nine columns do not fit into 80 characters.
    table = Table(title=values.title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for k, heading in enumerate(values.columns):
        lines = heading.replace(" ", "\n", 1) if len(heading) > 8 else heading
        table.add_column(lines, justify="left" if k < 2 else "right", no_wrap=k > 0)
    for row in values.rows:
        method = METHOD_STYLES[row[0].text]
        cells = [f"[bold]{cell.text}[/]" if cell.mark else cell.text for cell in row[1:]]
        table.add_row(f"[{method}]{row[0].text}[/]", *cells)
    return table
