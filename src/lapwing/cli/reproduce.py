"""`lapwing reproduce`: run a study by name, and write its record, page and tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from lapwing.errors import InputError

if TYPE_CHECKING:
    from lapwing_studies.report.study import StudyPage
    from lapwing_studies.report.tables import Table
    from lapwing_studies.reproduce.effort import Effort
    from lapwing_studies.reproduce.study import Study


class TableName(str, Enum):
    battery = "battery"
    antoran2022 = "antoran2022"
    batchnorm_1d = "batchnorm-1d"
    subnetwork_1d = "subnetwork-1d"
    immer2021_uci = "immer2021-uci"
    banana = "banana"
    step = "step"
    sampled_laplace = "sampled-laplace"
    preconditioners = "preconditioners"
    product_cost = "product-cost"
    alarm = "alarm"
    conformal = "conformal"
    fisher = "fisher"
    small_held_out = "small-held-out"
    quality = "quality"
    ct = "ct"


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    table: TableName
    data: Path | None
    out: Path
    quick: bool
    seeds: int | None
    again: bool
    tier: str | None = None  # of studies that have more than two

    @property
    def command(self) -> str:
        words = ["lapwing reproduce", self.table.value]
        words += ["--data DIR"] if self.data is not None else []
        words += ["--quick"] if self.quick else []
        words += [f"--tier {self.tier}"] if self.tier is not None else []
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        return " ".join(words)


def run_study(options: Options) -> tuple[Any, StudyPage, Path]:
    """Run what has not been run; write record.json, report.html, picture.png and tables.md to the output folder."""
    from lapwing_studies.report.study import markdown, write_study

    run, report = _study_and_report(options.table)
    record = run(study(options))
    page, folder = report.page(record, options.command), options.out / options.table.value
    path = write_study(page, folder / "report.html")
    report.picture(record, folder / "picture.png")
    text = json.dumps(record, allow_nan=False) + "\n"
    (folder / "record.json").write_text(text, encoding="utf-8")
    tables = "\n\n".join(f"{table.title}\n\n{markdown(table)}" for table in page.tables)
    (folder / "tables.md").write_text(tables + "\n", encoding="utf-8")
    return record, page, path


def _study_and_report(table: TableName) -> tuple[Any, Any]:
    """The function that runs a study, and the module that renders its page."""
    from lapwing_studies.report import alarm as alarm_report
    from lapwing_studies.report import antoran as antoran_report
    from lapwing_studies.report import banana as banana_report
    from lapwing_studies.report import batchnorm as batchnorm_report
    from lapwing_studies.report import battery as battery_report
    from lapwing_studies.report import conformal as conformal_report
    from lapwing_studies.report import ct as ct_report
    from lapwing_studies.report import fisher as fisher_report
    from lapwing_studies.report import immer as immer_report
    from lapwing_studies.report import preconditioners as preconditioners_report
    from lapwing_studies.report import product_cost as product_cost_report
    from lapwing_studies.report import quality as quality_report
    from lapwing_studies.report import sampled as sampled_report
    from lapwing_studies.report import small_held_out as small_held_out_report
    from lapwing_studies.report import step as step_report
    from lapwing_studies.report import subnetwork as subnetwork_report
    from lapwing_studies.reproduce import (
        alarm,
        antoran,
        banana,
        batchnorm,
        battery,
        conformal,
        ct,
        fisher,
        immer,
        preconditioners,
        product_cost,
        quality,
        sampled,
        small_held_out,
        step,
        subnetwork,
    )

    return {
        TableName.battery: (battery.run, battery_report),
        TableName.antoran2022: (antoran.run, antoran_report),
        TableName.batchnorm_1d: (batchnorm.run, batchnorm_report),
        TableName.subnetwork_1d: (subnetwork.run, subnetwork_report),
        TableName.immer2021_uci: (immer.run, immer_report),
        TableName.banana: (banana.run, banana_report),
        TableName.step: (step.run, step_report),
        TableName.sampled_laplace: (sampled.run, sampled_report),
        TableName.preconditioners: (preconditioners.run, preconditioners_report),
        TableName.product_cost: (product_cost.run, product_cost_report),
        TableName.alarm: (alarm.run, alarm_report),
        TableName.conformal: (conformal.run, conformal_report),
        TableName.ct: (ct.run, ct_report),
        TableName.fisher: (fisher.run, fisher_report),
        TableName.quality: (quality.run, quality_report),
        TableName.small_held_out: (small_held_out.run, small_held_out_report),
    }[table]


def study(options: Options) -> Study:
    from lapwing_studies.reproduce.effort import FULL, QUICK
    from lapwing_studies.reproduce.folder import DataFolder
    from lapwing_studies.reproduce.store import Store
    from lapwing_studies.reproduce.study import Study

    if options.data is not None and not options.data.is_dir():
        raise InputError(f"--data {options.data} is not a folder.")
    effort = QUICK if options.quick else FULL
    if options.tier is not None:
        effort = _of_tier(options)
    n_seeds = _n_seeds(options, effort.n_seeds) if options.seeds is None else options.seeds
    if n_seeds < 1:
        raise InputError(f"--seeds must be at least 1, got {n_seeds}.")
    return Study(
        DataFolder(options.data), Store(options.out / options.table.value), effort, n_seeds, again=options.again
    )


def _of_tier(options: Options) -> Effort:
    """The effort that a tier names; only of the study that has them."""
    from lapwing_studies.reproduce.effort import FULL, QUICK

    tiers = {"quick": QUICK, "standard": FULL, "faithful": replace(FULL, name="faithful")}
    if options.table is not TableName.ct or options.quick:
        raise InputError("--tier belongs to the study ct, and stands for --quick there: give one of the two.")
    if options.tier not in tiers:
        raise InputError(f"--tier must be one of {', '.join(tiers)}; got {options.tier!r}.")
    return tiers[options.tier]


def _n_seeds(options: Options, usual: int) -> int:
    """Number of seeds if not given: ten where the published splits are ten, one where figures are drawn once."""
    if options.table is TableName.immer2021_uci:
        return 3 if options.quick else 10
    if options.table is TableName.small_held_out:
        return 1 if options.quick else 10
    if options.table is TableName.quality:
        return 1 if options.quick else 5
    several = {
        TableName.battery, TableName.antoran2022, TableName.batchnorm_1d, TableName.subnetwork_1d, TableName.alarm,
        TableName.conformal,
    }  # fmt: skip
    return usual if options.table in several else 1


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
