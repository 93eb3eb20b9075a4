"""Records → what a terminal shows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from lapwing.bench.records import DemoRecord
    from lapwing.report.tables import Table as Values

METHOD_STYLES = {"MAP": "yellow", "sampled network": "magenta", "GLM": "cyan"}


def show_demo(record: DemoRecord, page: Path) -> None:
    """Both tables, then where the report is: the path comes last, so that it is the line people see."""
    from lapwing.report import tables

    console = Console()
    for values in (tables.regression(record["regression"]), tables.digits(record["digits"])):
        console.print(_table(values))
        console.print(f"[dim]{escape(values.see)} {escape(values.note)}[/]\n", highlight=False)
    console.print(f"Took {record['seconds']:.0f} s. Open the report in a browser:")
    console.print(f"  [bold]{page.resolve()}[/]", soft_wrap=True, highlight=False)


def show_bench(record: dict[str, Any], path: Path) -> None:
    """One line per measurement: the ratio, its unit, the goal and whether it is met."""
    table = Table(title=f"Workload {record['workload']}", title_justify="left")
    table.add_column("what")
    for heading in ("measured", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    table.add_column("")
    for row in record["rows"]:
        met = row["goal"] is None or row["ratio"] <= row["goal"]
        goal = "–" if row["goal"] is None else f"≤ {row['goal']:g}"
        verdict = "[green]met[/]" if met else "[red]missed[/]"
        table.add_row(row["what"], f"{row['ratio']:.3g}", goal, row["unit"], verdict)
    console = Console()
    console.print(table)
    console.print(f"Saved to {path}", soft_wrap=True, highlight=False)


def _table(values: Values) -> Table:
    # No rules, one space: with more, nine columns do not fit a terminal of eighty characters.
    table = Table(title=values.title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for k, heading in enumerate(values.columns):
        lines = heading.replace(" ", "\n", 1) if len(heading) > 8 else heading
        table.add_column(lines, justify="left" if k < 2 else "right", no_wrap=k > 0)
    for row in values.rows:
        method = METHOD_STYLES[row[0].text]
        cells = [f"[bold]{cell.text}[/]" if cell.mark else cell.text for cell in row[1:]]
        table.add_row(f"[{method}]{row[0].text}[/]", *cells)
    return table
